// Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} with a status.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "base/result.h"
#include "server/http/http.h"

namespace nfp::server {

struct ApiError {
  int status = 400;
  std::string message;    // says what is wrong and what would be right
  std::string param;      // the field at fault; empty = none
  std::string code;       // machine-readable; empty = none
  int retry_after_s = 1;  // of 429 and 503; 0 = trying again is no use
};

// What parsers return: nothing when all is well.
using MaybeError = std::optional<ApiError>;

inline ApiError bad_request(std::string param, std::string message, std::string code = "") {
  return ApiError{400, std::move(message), std::move(param), std::move(code)};
}

// kInvalidInput, kUnsupported and kUsage are the client's fault (400), kNotFound is 404, kResource means "later" (429),
// kCancelled and kDevice that this server answers no more (503); kIo is 500.
ApiError from_engine(const Error& error);

// Bytes of an error's message that are sent: parts of the request that it shows may be of any length.
inline constexpr size_t kMaxErrorMessage = 1000;

// `type` follows from the status.
std::string error_json(const ApiError& error);
http::Response error_response(const ApiError& error);

}  // namespace nfp::server

// For functions that return MaybeError.
#define NFP_API_TRY(expr)              \
  do {                                 \
    if (auto nfp_api_error = (expr)) { \
      return nfp_api_error;            \
    }                                  \
  } while (false)
