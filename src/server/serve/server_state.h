// What all requests of a server share. Set up before the first request, constant afterwards but for what is atomic.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_thread.h"
#include "server/api/generation_request.h"
#include "server/grammar/grammar.h"
#include "server/metrics/metrics.h"
#include "server/serve/served_model.h"
#include "server/serve/work_pool.h"
#include "server/tools/tool_call_parser.h"

namespace nfp::server {

struct ServerState {
  explicit ServerState(ServedModel served) : model(std::move(served)) {}

  ServedModel model;
  EngineThread* engine = nullptr;
  Metrics* metrics = nullptr;
  std::unique_ptr<GrammarCompiler> grammars;
  WorkPool* workers = nullptr;
  RequestLimits limits;
  ToolFormat tool_format = ToolFormat::kNone;
  PrecisionClass default_precision = PrecisionClass::kAuto;
  bool log_requests = true;
  bool log_prompts = false;
  uint64_t instance = 0;  // random: ids of two runs differ
  std::atomic<uint64_t> serial{0};
  std::atomic<int32_t> in_flight{0};  // generation requests being answered
};

}  // namespace nfp::server
