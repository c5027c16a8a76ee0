#include "server/api/api_error.h"

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

std::string_view type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 500:
      return "server_error";
    case 503:
      return "service_unavailable_error";
    default:
      return "invalid_request_error";
  }
}

void append_or_null(std::string& out, std::string_view text) {
  if (text.empty()) {
    out += "null";
  } else {
    append_string(out, text);
  }
}

}  // namespace

ApiError from_engine(const Error& error) {
  ApiError out;
  out.message = error.message;
  switch (error.code) {
    case ErrorCode::kInvalidInput:
    case ErrorCode::kUnsupported:
    case ErrorCode::kUsage:
      out.status = 400;
      break;
    case ErrorCode::kNotFound:
      out.status = 404;
      break;
    case ErrorCode::kResource:
      out.status = 429;
      break;
    case ErrorCode::kCancelled:
    case ErrorCode::kDevice:
      out.status = 503;
      break;
    case ErrorCode::kIo:
      out.status = 500;
      break;
  }
  return out;
}

std::string error_json(const ApiError& error) {
  std::string out = "{\"error\":{\"message\":";
  append_string(out, std::string_view(error.message).substr(0, kMaxErrorMessage));
  out += ",\"type\":";
  append_string(out, type_of(error.status));
  out += ",\"param\":";
  append_or_null(out, std::string_view(error.param).substr(0, kMaxErrorMessage));
  out += ",\"code\":";
  append_or_null(out, error.code);
  out += "}}";
  return out;
}

http::Response error_response(const ApiError& error) {
  http::Response response;
  response.status = error.status;
  response.body = error_json(error);
  if ((error.status == 429 || error.status == 503) && error.retry_after_s > 0) {
    response.headers.push_back({"Retry-After", std::to_string(error.retry_after_s)});
  }
  if (error.status == 401) response.headers.push_back({"WWW-Authenticate", "Bearer"});
  return response;
}

}  // namespace nfp::server
