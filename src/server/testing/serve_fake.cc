// The real HTTP server and engine over a fake model (fake_runner.h): what tests and load programs talk to.
#include <CLI/CLI.hpp>

#include <cstdio>

#include "base/log.h"
#include "base/mapped_file.h"
#include "base/stop_signals.h"
#include "server/grammar/grammar.h"
#include "server/serve/service.h"
#include "server/testing/byte_tokenizer.h"
#include "server/testing/fake_runner.h"

using namespace nfp;  // NOLINT(google-build-using-namespace)

namespace {

struct Flags {
  uint16_t port = 0;
  int32_t max_num_seqs = 64;
  int32_t kv_blocks = 65536;
  int32_t max_context = 4096;
  int32_t step_us = 0;
  int32_t token_us = 0;
  int32_t max_queue = 1024;
  int threads = 2;
  size_t max_connections = 16384;
  std::string policy = "threshold:1024";
  std::string tool_parser = "hermes";
  std::string root_path;
  std::vector<std::string> api_keys, origins;
  std::vector<std::string> hosts = {"*"};
  int32_t grammar_compile_ms = 10'000;
  uint64_t request_memory = 1u << 30;
  int32_t header_timeout_ms = 10'000;
  int32_t body_timeout_ms = 60'000;
  int32_t idle_timeout_ms = 75'000;
  int32_t drain_timeout_ms = 30'000;
  uint64_t max_body = 32u << 20;
  size_t stream_buffer = 256u << 10;
  double stall_timeout = 120;
  bool log_requests = false;
  bool strict = false;
  bool demo_load = false;
  std::string pooling = "last";
  std::string fp8_says;
  int32_t fails_after = 0;
  bool throws = false;
  std::string reasoning_parser = "auto";
  std::string chat_template;
  uint64_t response_store = 64u << 20;
  std::string generation_config;
  bool headless = false;
};

Status run(const Flags& flags) {
  server::ServiceOptions options;
  options.http.port = flags.port;
  options.http.threads = flags.threads;
  options.http.max_connections = flags.max_connections;
  options.http.header_timeout = std::chrono::milliseconds(flags.header_timeout_ms);
  options.http.body_timeout = std::chrono::milliseconds(flags.body_timeout_ms);
  options.http.idle_timeout = std::chrono::milliseconds(flags.idle_timeout_ms);
  options.http.max_body_bytes = flags.max_body;
  options.http.max_stream_buffer = flags.stream_buffer;
  options.api.api_keys = flags.api_keys;
  options.api.allowed_origins = flags.origins;
  options.api.root_path = flags.root_path;
  options.api.allowed_hosts = flags.hosts;
  if (flags.hosts == std::vector<std::string>{"loopback"}) options.api.allowed_hosts.clear();
  options.http.max_request_bytes = flags.request_memory;
  options.grammars.compile_time = std::chrono::milliseconds(flags.grammar_compile_ms);
  options.api.stall_timeout_s = flags.stall_timeout;
  options.tool_call_parser = flags.tool_parser;
  options.limits.strict = flags.strict;
  options.demo_load = flags.demo_load;
  options.default_pooling = flags.pooling == "mean" ? Pooling::kMean : Pooling::kLast;
  options.reasoning_parser = flags.reasoning_parser;
  options.response_store_bytes = flags.response_store;
  options.log_requests = flags.log_requests;
  if (flags.log_requests) log::set_level(log::Level::kInfo);
  options.drain_timeout = std::chrono::milliseconds(flags.drain_timeout_ms);
  server::FakeRunner runner({flags.max_context, std::chrono::microseconds(flags.step_us),
                             std::chrono::microseconds(flags.token_us),
                             flags.fp8_says.empty() ? 0 : flags.fp8_says.front(), flags.fails_after, flags.throws});
  NFP_ASSIGN_OR_RETURN(auto service, server::Service::listen(options));

  NFP_ASSIGN_OR_RETURN(auto tokenizer, server::make_byte_tokenizer());
  NFP_ASSIGN_OR_RETURN(auto policy, parse_policy(flags.policy));
  EngineConfig engine;
  engine.limits.max_sequences = flags.max_num_seqs;
  engine.limits.max_step_tokens = std::max(8192, 2 * flags.max_num_seqs);
  engine.limits.max_queue = flags.max_queue;
  engine.kv_blocks = flags.kv_blocks;
  engine.end_ids = {server::kByteEnd};
  server::ServedModel::Facts facts;
  facts.names = {"fake", "fake/alias"};
  facts.root = "fake";
  facts.tokenizer = tokenizer;
  facts.has_head = !flags.headless;
  facts.chat_template = server::kChatMlTemplate;
  NFP_RETURN_IF_ERROR(server::choose_chat_template(flags.chat_template, facts));
  if (!flags.generation_config.empty()) {
    const std::string file = flags.generation_config + "/generation_config.json";
    NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(file));
    NFP_ASSIGN_OR_RETURN(facts.sampling, parse_sampling_defaults(text, file));
  }
  auto made = std::make_unique<Engine>(engine, &runner, tokenizer, std::move(policy));
  NFP_RETURN_IF_ERROR(service->serve(std::move(facts), std::move(made)));
  std::printf("%s\n", service->url().c_str());
  std::fflush(stdout);
  wait_for_stop_signal();
  service->drain();
  if (service->engine().failed()) return error(ErrorCode::kDevice, "the device or the engine failed");
  return ok_status();
}

}  // namespace

int main(int argc, char** argv) {
  server::run_as_grammar_process(argc, argv);
  block_stop_signals();
  Flags flags;
  CLI::App app("the server over a model that costs nothing");
  app.add_option("--port", flags.port);
  app.add_option("--max-num-seqs", flags.max_num_seqs);
  app.add_option("--kv-blocks", flags.kv_blocks);
  app.add_option("--max-model-len", flags.max_context);
  app.add_option("--step-us", flags.step_us, "a token each so many microseconds; 0 = at once");
  app.add_option("--token-us", flags.token_us, "further time for each token of a step");
  app.add_option("--max-queue", flags.max_queue);
  app.add_option("--io-threads", flags.threads);
  app.add_option("--max-connections", flags.max_connections);
  app.add_option("--precision-policy", flags.policy);
  app.add_option("--tool-call-parser", flags.tool_parser);
  app.add_option("--root-path", flags.root_path);
  app.add_option("--api-key", flags.api_keys);
  app.add_option("--allowed-origins", flags.origins);
  app.add_option("--allowed-hosts", flags.hosts, "'loopback' = as without the flag in the program");
  app.add_option("--grammar-compile-timeout-ms", flags.grammar_compile_ms);
  app.add_option("--max-request-memory", flags.request_memory);
  app.add_option("--header-timeout-ms", flags.header_timeout_ms);
  app.add_option("--body-timeout-ms", flags.body_timeout_ms);
  app.add_option("--idle-timeout-ms", flags.idle_timeout_ms);
  app.add_option("--drain-timeout-ms", flags.drain_timeout_ms);
  app.add_option("--max-body", flags.max_body);
  app.add_option("--stream-buffer", flags.stream_buffer);
  app.add_option("--stall-timeout", flags.stall_timeout);
  app.add_option("--response-store-memory", flags.response_store);
  app.add_option("--reasoning-parser", flags.reasoning_parser);
  app.add_option("--chat-template", flags.chat_template);
  app.add_flag("--strict-requests", flags.strict);
  app.add_flag("--demo-load", flags.demo_load);
  app.add_option("--pooling", flags.pooling);
  app.add_flag("--headless", flags.headless, "a model without a head");
  app.add_option("--fp8-says", flags.fp8_says, "one character: the tenth of answers in FP8 steps");
  app.add_option("--fails-after", flags.fails_after, "steps after which the device is lost");
  app.add_flag("--throws", flags.throws, "an exception then, out of the step");
  app.add_option("--generation-config", flags.generation_config);
  app.add_flag("--log-requests", flags.log_requests);
  CLI11_PARSE(app, argc, argv);
  if (const Status status = run(flags); !status.ok()) {
    log::error("{}", status.error().message);
    return 1;
  }
  return 0;
}
