// The whole server as a program runs it: listens, takes a model when it is loaded, answers until it is told to stop.
//
//   NFP_ASSIGN_OR_RETURN(auto service, Service::listen(options));   // answers 503 from here on
//   ... load the model ...
//   NFP_RETURN_IF_ERROR(service->serve(std::move(facts), std::move(engine)));
//   wait_for_stop_signal();
//   service->drain();
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/http/http_server.h"
#include "server/serve/api.h"
#include "server/serve/demo_load.h"
#include "server/serve/server_state.h"

namespace nfp::server {

struct ServiceOptions {
  http::ServerOptions http;
  ApiOptions api;
  RequestLimits limits;
  std::string tool_call_parser = "auto";
  std::string reasoning_parser = "auto";
  PrecisionClass default_precision = PrecisionClass::kAuto;
  Pooling default_pooling = Pooling::kLast;                            // of embeddings that do not say
  uint64_t response_store_bytes = ServerState::kDefaultResponseBytes;  // of the Responses API; 0 = keep none
  bool refuses_late = false;                                           // see ServerState
  bool log_requests = true;
  bool log_prompts = false;
  bool demo_load = false;  // see DemoLoad
  std::string step_log;    // a file for StepLog; empty = none
  GrammarLimits grammars;
  std::chrono::milliseconds drain_timeout{30'000};
};

class Service {
 public:
  static Result<std::unique_ptr<Service>> listen(ServiceOptions options);
  ~Service();

  // Begins to answer with this model. Once. What the engine runs on (runner, model) must outlive the service.
  Status serve(ServedModel::Facts facts, std::unique_ptr<Engine> engine);
  std::string url() const;
  ServerState& state() { return *state_; }
  Metrics& metrics() { return metrics_; }
  EngineThread& engine() { return *engine_; }

  // Refuses new work and waits for what runs, at most the drain timeout. True when everything had ended.
  bool drain();

 private:
  explicit Service(ServiceOptions options);

  ServiceOptions options_;
  Api api_;
  Metrics metrics_;
  std::unique_ptr<GrammarHost> grammar_host_;  // until serve()
  std::unique_ptr<ServerState> state_;
  // Freed from the last to the first. Sinks in the engine hold exchanges, so the engine goes before the server.
  std::unique_ptr<http::Server> http_;
  std::unique_ptr<EngineThread> engine_;
  std::unique_ptr<WorkPool> workers_;
  std::unique_ptr<WorkPool> grammar_workers_;
  std::unique_ptr<DemoLoad> demo_load_;
};

}  // namespace nfp::server
