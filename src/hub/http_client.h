// GET over HTTP and HTTPS, with the rules that downloads with a secret need.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"

namespace nfp {

struct HttpRequest {
  std::string url;
  std::string token;    // sent as "Authorization: Bearer", and only to the origin of `url`; empty = none
  uint64_t offset = 0;  // first byte wanted (a Range request); 0 = all
};

struct HttpReply {
  long status = 0;
  std::string url;                             // that answered, after redirects
  std::map<std::string, std::string> headers;  // names in lower case; of every hop, later ones winning
  std::string body;                            // of an answer other than 2xx: its first 4 KiB

  // Empty where there is none.
  std::string header(const std::string& name) const;
};

// For logs and terminals: without the query, as URLs of stores carry signatures there, and without name and password.
std::string printable_url(const std::string& url);

// Receives the body of a 2xx answer in parts; an error ends the transfer and is returned.
using BodySink = std::function<Status(const HttpReply&, std::span<const std::byte>)>;

// One connection at a time, kept open between requests. Not thread-safe: one for each thread. Proxies are those of the
// usual environment variables (https_proxy, no_proxy); SSL_CERT_FILE names other certificates than the system's.
class HttpClient {
 public:
  static Result<std::unique_ptr<HttpClient>> create();
  virtual ~HttpClient() = default;

  // Follows up to ten redirects, never from https to http, and gives the token to no other origin (scheme, host, port)
  // than the first. Any status is a reply. Errors: kIo where trying again may help (the network, a connection that
  // ended early), kUnsupported where it will not (a URL, a certificate), kCancelled once `stop` is set, and the sink's.
  virtual Result<HttpReply> fetch(const HttpRequest& request, const BodySink& sink, const std::atomic<bool>* stop) = 0;
};

}  // namespace nfp
