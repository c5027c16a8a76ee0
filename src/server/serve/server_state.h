// What all requests of a server share. Set up before the first request, constant afterwards but for what is atomic.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/engine_thread.h"
#include "server/api/generation_request.h"
#include "server/grammar/grammar.h"
#include "server/metrics/metrics.h"
#include "server/serve/cache_scopes.h"
#include "server/serve/response_store.h"
#include "server/serve/served_model.h"
#include "server/serve/work_pool.h"
#include "server/tools/reasoning_parser.h"
#include "server/tools/tool_call_parser.h"

namespace nfp::server {

class DemoLoad;
class LiveRequest;

// Those that are being answered, so that all can be ended at once.
class LiveRequests {
 public:
  void add(const std::shared_ptr<LiveRequest>& one) {
    const std::lock_guard lock(mutex_);
    live_[one.get()] = one;
  }
  void remove(const LiveRequest* one) {
    const std::lock_guard lock(mutex_);
    live_.erase(one);
  }
  std::vector<std::shared_ptr<LiveRequest>> all() const {
    std::vector<std::shared_ptr<LiveRequest>> out;
    const std::lock_guard lock(mutex_);
    for (const auto& [key, weak] : live_) {
      if (auto one = weak.lock()) out.push_back(std::move(one));
    }
    return out;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const LiveRequest*, std::weak_ptr<LiveRequest>> live_;
};

struct ServerState {
  static constexpr uint64_t kDefaultResponseBytes = 64u << 20;
  explicit ServerState(ServedModel served, uint64_t response_bytes = kDefaultResponseBytes)
      : model(std::move(served)), responses(response_bytes) {}

  ServedModel model;
  EngineThread* engine = nullptr;
  Metrics* metrics = nullptr;
  DemoLoad* demo_load = nullptr;  // null = off
  std::unique_ptr<GrammarCompiler> grammars;
  WorkPool* workers = nullptr;
  WorkPool* grammar_workers = nullptr;  // each waits for one grammar to be compiled
  LiveRequests live;
  ResponseStore responses;
  RequestLimits limits;
  ToolFormat tool_format = ToolFormat::kNone;
  ReasoningFormat reasoning_format = ReasoningFormat::kNone;
  PrecisionClass default_precision = PrecisionClass::kAuto;
  Pooling default_pooling = Pooling::kLast;  // of embeddings
  // The policy may refuse a request that waits. A stream's head then waits for its first token, so that a refusal has
  // its status.
  bool refuses_late = false;
  bool log_requests = true;
  bool log_prompts = false;
  uint64_t instance = 0;  // random: ids of two runs differ
  std::atomic<uint64_t> serial{0};
  CacheScopes cache_scopes;

  std::atomic<int32_t> in_flight{0};  // requests for text or embeddings being answered
};

}  // namespace nfp::server
