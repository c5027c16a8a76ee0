#include "server/serve/service.h"

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <random>

#include "base/log.h"
#include "server/serve/live_request.h"

namespace nfp::server {

Service::Service(ServiceOptions options) : options_(std::move(options)), api_(options_.api) {}

Result<std::unique_ptr<Service>> Service::listen(ServiceOptions options) {
  // A log that nobody reads any more must not end the server.
  std::signal(SIGPIPE, SIG_IGN);
  std::unique_ptr<Service> service(new Service(std::move(options)));
  if (!service->options_.step_log.empty()) {
    NFP_ASSIGN_OR_RETURN(auto log, StepLog::create(service->options_.step_log));
    service->metrics_.set_step_log(std::move(log));
  }
  NFP_ASSIGN_OR_RETURN(service->grammar_host_, start_grammar_host());
  NFP_ASSIGN_OR_RETURN(service->http_, http::Server::listen(service->options_.http, &service->api_));
  service->api_.set_loopback(service->http_->on_loopback());
  service->api_.set_server_stats([http = service->http_.get()] { return http->stats(); });
  service->http_->start();
  return service;
}

Service::~Service() {
  api_.set_draining();
  if (demo_load_) demo_load_->set_rate(0);
  if (http_) http_->stop();
  workers_.reset();
  grammar_workers_.reset();
  demo_load_.reset();
  engine_.reset();
}

Status Service::serve(ServedModel::Facts facts, std::unique_ptr<Engine> engine) {
  const std::string templates = facts.chat_template + facts.chat_template_json;
  NFP_ASSIGN_OR_RETURN(const ToolFormat tools, parse_tool_format(options_.tool_call_parser, templates));
  NFP_ASSIGN_OR_RETURN(const ReasoningFormat reasoning, parse_reasoning_format(options_.reasoning_parser, templates));
  NFP_ASSIGN_OR_RETURN(ServedModel model, ServedModel::create(std::move(facts), *engine));
  state_ = std::make_unique<ServerState>(std::move(model), options_.response_store_bytes);
  const ServedModel& served = state_->model;
  workers_ = std::make_unique<WorkPool>(2, 256);
  grammar_workers_ = std::make_unique<WorkPool>(32, 256);
  engine->set_observer(&metrics_);
  metrics_.set_prefix_caching(engine->config().prefix_caching);
  metrics_.timeline().set_policy(engine->policy().name(), engine->config().targets);
  engine_ = std::make_unique<EngineThread>(std::move(engine), [this](const Error& lost) {
    try {
      const std::string_view what = lost.code == ErrorCode::kDevice ? "device" : "engine";
      log::error("the {} is lost, and this process with it: {}", what, lost.message);
    } catch (const std::exception&) {  // not even memory for the line
    }
    // The program drains, and exits with an error. Where it drains already, a second signal would end it at once.
    if (!api_.draining()) ::kill(::getpid(), SIGTERM);
  });
  state_->engine = engine_.get();
  state_->metrics = &metrics_;
  state_->grammars = make_grammar_compiler(served.facts().tokenizer, served.bounds().vocab, served.end_ids(),
                                           std::move(grammar_host_), options_.grammars);
  state_->workers = workers_.get();
  state_->grammar_workers = grammar_workers_.get();
  state_->limits = options_.limits;
  state_->limits.keep_responses = options_.response_store_bytes > 0;
  state_->tool_format = tools;
  state_->reasoning_format = reasoning;
  state_->default_precision = options_.default_precision;
  state_->default_pooling = options_.default_pooling;
  state_->log_requests = options_.log_requests;
  state_->log_prompts = options_.log_prompts;
  state_->refuses_late = options_.refuses_late;
  if (options_.demo_load) {
    const RequestBounds bounds = served.bounds();
    demo_load_ = std::make_unique<DemoLoad>(*engine_, bounds.vocab, bounds.max_context);
    state_->demo_load = demo_load_.get();
  }
  state_->instance = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  api_.set_ready(state_.get());
  return ok_status();
}

std::string Service::url() const { return http_->url() + api_.root_path(); }

bool Service::drain() {
  api_.set_draining();
  if (demo_load_) demo_load_->set_rate(0);
  http_->stop_accepting();
  const bool ended = http_->wait_idle(options_.drain_timeout);
  if (!ended) {
    log::warn("{} requests did not end in time and are cut off", http_->stats().exchanges);
    // Their streams end with an event that says so, where the client still reads.
    if (state_) {
      for (const auto& request : state_->live.all()) request->cut_off();
    }
    http_->wait_idle(std::chrono::milliseconds(500));
  }
  return ended;
}

}  // namespace nfp::server
