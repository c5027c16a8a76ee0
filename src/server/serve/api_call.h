// One request on its way through the API: shared by the files that implement it.
#pragma once

#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/serve/api.h"
#include "server/serve/live_request.h"

namespace nfp::server {

inline constexpr size_t kInlineBody = 16u << 10;  // bytes of JSON; more is read on a worker
inline constexpr size_t kHeavyBody = 1u << 20;    // more may take seconds to be tokenized

struct Api::Call : std::enable_shared_from_this<Api::Call> {
  http::Request request;
  std::shared_ptr<http::Exchange> exchange;
  std::string_view path;    // without the root path
  std::string_view logged;  // see Route
  std::string request_id;
  std::vector<http::Header> headers;  // for the answer
  int key = 0;                        // which API key; 0 = there are none
  bool on_worker = false;             // not on the exchange's thread
  std::stop_source stop;              // the client has gone

  // For whoever answers it; takes over what it holds.
  RequestContext context() { return {exchange, request_id, headers, stop, std::move(request.lease)}; }
};

}  // namespace nfp::server
