#include "hub/http_client.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>

#include "hub/libcurl.h"

namespace nfp {

std::string HttpReply::header(const std::string& name) const {
  const auto place = headers.find(name);
  return place == headers.end() ? "" : place->second;
}

std::string printable_url(const std::string& url) {
  std::string shown = url.substr(0, url.find('?'));
  const size_t scheme = shown.find("//");
  if (scheme == std::string::npos) return shown;
  const size_t host_end = shown.find('/', scheme + 2);
  const size_t at = shown.substr(0, host_end).rfind('@');
  if (at != std::string::npos && at > scheme) shown.erase(scheme + 2, at - scheme - 1);
  return shown;
}

namespace {

constexpr int kMaxRedirects = 10;
constexpr long kConnectTimeout = 10;  // seconds
constexpr long kStallTimeout = 30;    // seconds with less than a byte a second
constexpr size_t kErrorBody = 4096;

struct Origin {
  std::string scheme, host, port;
  bool operator==(const Origin&) const = default;
};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.remove_suffix(1);
  return std::string(text);
}

// libcurl's own reading of the URL: that of the request which follows.
std::optional<Origin> origin_of(const Libcurl& curl, const std::string& url) {
  CURLU* parsed = curl.url();
  if (parsed == nullptr) return std::nullopt;
  const auto part = [&](CURLUPart which, std::string& out) {
    char* text = nullptr;
    if (curl.url_get(parsed, which, &text, CURLU_DEFAULT_PORT) != CURLUE_OK) return false;
    out = lower(text);
    curl.free(text);
    return true;
  };
  Origin origin;
  const bool good = curl.url_set(parsed, CURLUPART_URL, url.c_str(), 0) == CURLUE_OK &&
                    part(CURLUPART_SCHEME, origin.scheme) && part(CURLUPART_HOST, origin.host) &&
                    part(CURLUPART_PORT, origin.port) && (origin.scheme == "https" || origin.scheme == "http");
  curl.url_cleanup(parsed);
  return good ? std::optional<Origin>(std::move(origin)) : std::nullopt;
}

bool may_help_again(CURLcode code) {
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_PARTIAL_FILE:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
    case CURLE_SSL_CONNECT_ERROR:
      return true;
    default:
      return false;
  }
}

class CurlClient final : public HttpClient {
 public:
  CurlClient(const Libcurl& curl, CURL* handle) : curl_(curl), handle_(handle) {}
  ~CurlClient() override { curl_.easy_cleanup(handle_); }

  Result<HttpReply> fetch(const HttpRequest& request, const BodySink& sink, const std::atomic<bool>* stop) override {
    const auto first = origin_of(curl_, request.url);
    if (!first) return error(ErrorCode::kUnsupported, "{}: is not an http or https URL", printable_url(request.url));
    HttpReply reply;
    reply.url = request.url;
    Origin here = *first;
    for (int hop = 0; hop <= kMaxRedirects; ++hop) {
      std::string next;
      NFP_RETURN_IF_ERROR(perform(request, here == *first, sink, stop, reply, next));
      if (next.empty()) return reply;
      const auto there = origin_of(curl_, next);
      if (!there) return error(ErrorCode::kUnsupported, "{}: redirects to what is no URL", printable_url(reply.url));
      if (here.scheme == "https" && there->scheme != "https") {
        return error(ErrorCode::kUnsupported, "{}: redirects from https to http ({}); refused",
                     printable_url(reply.url), printable_url(next));
      }
      here = *there;
      reply.url = std::move(next);
    }
    return error(ErrorCode::kUnsupported, "{}: more than {} redirects", printable_url(request.url), kMaxRedirects);
  }

 private:
  struct Transfer {
    CurlClient* client;
    HttpReply* reply;
    const BodySink* sink;
    const std::atomic<bool>* stop;
    Status status;  // the sink's
  };

  template <typename Value>
  void set(CURLoption option, Value value) {
    (void)curl_.easy_setopt(handle_, option, value);
  }

  static size_t on_header(char* data, size_t size, size_t count, void* user) {
    auto& transfer = *static_cast<Transfer*>(user);
    const std::string_view line(data, size * count);
    if (const size_t colon = line.find(':'); colon != std::string_view::npos && transfer.reply->headers.size() < 256) {
      transfer.reply->headers[lower(std::string(line.substr(0, colon)))] = trimmed(line.substr(colon + 1));
    }
    return size * count;
  }

  static size_t on_body(char* data, size_t size, size_t count, void* user) {
    auto& transfer = *static_cast<Transfer*>(user);
    HttpReply& reply = *transfer.reply;
    const size_t bytes = size * count;
    (void)transfer.client->curl_.easy_getinfo(transfer.client->handle_, CURLINFO_RESPONSE_CODE, &reply.status);
    if (reply.status / 100 == 2) {
      transfer.status = (*transfer.sink)(reply, {reinterpret_cast<const std::byte*>(data), bytes});
      return transfer.status.ok() ? bytes : 0;
    }
    reply.body.append(data, std::min(bytes, kErrorBody - std::min(kErrorBody, reply.body.size())));
    return bytes;
  }

  static int on_progress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    const auto& transfer = *static_cast<Transfer*>(user);
    return transfer.stop != nullptr && transfer.stop->load() ? 1 : 0;
  }

  // One request. `next`: where it redirects to; empty = it does not.
  Status perform(const HttpRequest& request, bool own_origin, const BodySink& sink, const std::atomic<bool>* stop,
                 HttpReply& reply, std::string& next) {
    reply.body.clear();
    reply.headers.erase("location");
    Transfer transfer{this, &reply, &sink, stop, {}};
    char message[CURL_ERROR_SIZE] = "";
    curl_.easy_reset(handle_);
    set(CURLOPT_URL, reply.url.c_str());
    set(CURLOPT_USERAGENT, "nestedfp/" NFP_VERSION);
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_CONNECTTIMEOUT, kConnectTimeout);
    set(CURLOPT_LOW_SPEED_LIMIT, 1L);
    set(CURLOPT_LOW_SPEED_TIME, kStallTimeout);
    set(CURLOPT_ERRORBUFFER, message);
    set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);  // a proxy's
    set(CURLOPT_HEADERFUNCTION, &on_header);
    set(CURLOPT_HEADERDATA, &transfer);
    set(CURLOPT_WRITEFUNCTION, &on_body);
    set(CURLOPT_WRITEDATA, &transfer);
    set(CURLOPT_NOPROGRESS, 0L);
    set(CURLOPT_XFERINFOFUNCTION, &on_progress);
    set(CURLOPT_XFERINFODATA, &transfer);
    // Not RESUME_FROM: with that, libcurl itself refuses a server that sends the whole file again.
    const std::string range = std::to_string(request.offset) + "-";
    if (request.offset > 0) set(CURLOPT_RANGE, range.c_str());
    if (const char* bundle = std::getenv("SSL_CERT_FILE"); bundle != nullptr && *bundle != '\0') {
      set(CURLOPT_CAINFO, bundle);
    }
    curl_slist* headers = nullptr;
    if (!request.token.empty() && own_origin) {
      headers = curl_.slist_append(headers, ("Authorization: Bearer " + request.token).c_str());
    }
    set(CURLOPT_HTTPHEADER, headers);
    const CURLcode code = curl_.easy_perform(handle_);
    set(CURLOPT_HTTPHEADER, static_cast<curl_slist*>(nullptr));
    curl_.slist_free_all(headers);
    (void)curl_.easy_getinfo(handle_, CURLINFO_RESPONSE_CODE, &reply.status);

    if (stop != nullptr && stop->load()) return error(ErrorCode::kCancelled, "stopped");
    if (!transfer.status.ok()) return std::move(transfer.status);
    if (code != CURLE_OK) {
      return error(may_help_again(code) ? ErrorCode::kIo : ErrorCode::kUnsupported, "{}: {}", printable_url(reply.url),
                   *message != '\0' ? message : curl_.easy_strerror(code));
    }
    const bool redirect =
        reply.status == 301 || reply.status == 302 || reply.status == 303 || reply.status == 307 || reply.status == 308;
    char* target = nullptr;
    if (redirect && curl_.easy_getinfo(handle_, CURLINFO_REDIRECT_URL, &target) == CURLE_OK && target != nullptr) {
      next = target;
    }
    return ok_status();
  }

  const Libcurl& curl_;
  CURL* handle_;
};

}  // namespace

Result<std::unique_ptr<HttpClient>> HttpClient::create() {
  NFP_ASSIGN_OR_RETURN(const Libcurl* curl, libcurl());
  CURL* handle = curl->easy_init();
  if (handle == nullptr) return error(ErrorCode::kResource, "libcurl cannot start a transfer (no memory)");
  return std::unique_ptr<HttpClient>(std::make_unique<CurlClient>(*curl, handle));
}

}  // namespace nfp
