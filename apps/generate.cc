// nestedfp generate: continues a prompt, streaming.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/process_memory.h"
#include "flags.h"
#include "interrupt.h"
#include "json_output.h"
#include "runtime/generation.h"
#include "status_line.h"
#include "text/utf8.h"
#include "verbs.h"

namespace nfp {
namespace {

struct GenerateFlags {
  ModelFlags model;
  SamplingFlags sampling;
  std::string prompt;
  std::string file;
  const CLI::Option* prompt_option = nullptr;  // which may be given, and empty
  const CLI::Option* file_option = nullptr;
  int32_t switch_every = 0;
  bool json = false;
  bool quiet = false;
};

Result<std::string> read_prompt(const GenerateFlags& flags) {
  if (flags.prompt_option->count() > 0) {
    if (!text::is_utf8(flags.prompt)) return error(ErrorCode::kUsage, "--prompt is not UTF-8");
    return flags.prompt;
  }
  if (flags.file_option->count() > 0) return read_plain_text("--file", flags.file);
  if (::isatty(STDIN_FILENO) != 0) {
    return error(ErrorCode::kUsage, "no prompt; give one with -p TEXT, -f FILE or on standard input");
  }
  NFP_ASSIGN_OR_RETURN(std::string prompt, read_text(STDIN_FILENO, "standard input"));
  if (!text::is_utf8(prompt)) return error(ErrorCode::kInvalidInput, "standard input: is not UTF-8");
  return prompt;
}

// no-color.org's word.
bool colour_wanted() {
  const char* const none = std::getenv("NO_COLOR");
  return takes_escapes(STDOUT_FILENO) && (none == nullptr || *none == '\0');
}

// Prints pieces as they come. With --switch-every, text computed in FP8 is marked: coloured on a terminal, and "[fp8]"
// / "[fp16]" where the precision changes.
class Printer {
 public:
  explicit Printer(bool mark) : mark_(mark), colour_(mark && colour_wanted()) {}
  void operator()(const RequestOutput& output) {
    if (mark_ && !output.tokens.empty() && output.tokens.front().precision != last_) {
      last_ = output.tokens.front().precision;
      if (colour_) fmt::print("{}", is_exact(*last_) ? "\033[0m" : "\033[33m");
      fmt::print("[{}]", name_of(*last_));
    }
    fmt::print("{}", output.text);
    std::fflush(stdout);
    if (output.finish && colour_) fmt::print("\033[0m");
  }

 private:
  bool mark_;
  bool colour_;
  std::optional<Precision> last_;
};

void print_json(const GenerateFlags& flags, const LoadedModel& loaded, const Generation& g, const EngineStats& stats,
                uint64_t seed) {
  nlohmann::ordered_json tokens = nlohmann::ordered_json::array();
  for (const OutputToken& token : g.tokens)
    tokens.push_back({{"id", token.token}, {"precision", name_of(token.precision)}});
  const ProcessMemory memory = process_memory();
  const nlohmann::ordered_json out = {{"model", flags.model.model},
                                      {"backend", loaded.backend->info().device},
                                      {"text", g.text},
                                      {"finish_reason", name_of(g.finish)},
                                      {"tokens", tokens},
                                      {"seed", seed},
                                      {"usage",
                                       {{"prompt_tokens", g.usage.prompt_tokens},
                                        {"completion_tokens", g.usage.completion_tokens},
                                        {"fp16_tokens", g.usage.prompt.fp16 + g.usage.completion.fp16},
                                        {"fp8_tokens", g.usage.prompt.fp8 + g.usage.completion.fp8},
                                        {"draft_tokens", stats.drafted_tokens},
                                        {"accepted_draft_tokens", stats.accepted_tokens}}},
                                      {"load_s", loaded.load_seconds},
                                      {"ttft_s", g.times.ttft_s},
                                      {"prefill_tokens_per_s", g.times.prefill_tokens_per_s},
                                      {"decode_tokens_per_s", g.times.decode_tokens_per_s},
                                      {"weight_bytes", loaded.model->weight_bytes()},
                                      {"peak_memory_bytes", memory.peak}};
  print_indented(out);
}

Status run(const GenerateFlags& flags) {
  NFP_ASSIGN_OR_RETURN(const std::string prompt, read_prompt(flags));
  NFP_RETURN_IF_ERROR(flags.sampling.check());
  const Precision precision = flags.model.precision_value();
  const Precision fp8 = is_exact(precision) ? Precision::kFp8 : precision;
  const std::string policy =
      flags.switch_every > 0 ? fmt::format("alternate:{}", flags.switch_every) : flags.model.precision;
  NFP_ASSIGN_OR_RETURN(auto chosen, parse_policy(policy, fp8));

  SamplingParams sampling;
  NFP_ASSIGN_OR_RETURN(const auto loaded, flags.model.load(false, 0, "--ctx", [&](const LoadedModel& opened) -> Status {
    NFP_ASSIGN_OR_RETURN(sampling, flags.sampling.of_model(*opened.source));
    return ok_status();
  }));
  if (!sampling.seed) sampling.seed = std::random_device{}();
  warn_of_idle_speculation(flags.model.speculative_tokens, flags.model.precision);
  EngineConfig config = flags.model.engine_config();
  config.fp8 = fp8;
  NFP_ASSIGN_OR_RETURN(ServingEngine engine, make_engine(*loaded, std::move(config), std::move(chosen)));
  Request request;
  request.id = "generate";
  NFP_ASSIGN_OR_RETURN(request.prompt, loaded->tokenizer->encode(prompt));
  request.sampling = sampling;
  const auto context = static_cast<size_t>(engine.runner->max_context());
  const auto most = static_cast<size_t>(loaded->config.max_context);
  if (request.prompt.size() >= context) {  // before it is shown
    return error(ErrorCode::kUsage,
                 "the prompt has {} tokens, which do not fit the context of {} with one of the answer; shorten it{}",
                 request.prompt.size(), context,
                 request.prompt.size() < most ? fmt::format(", or give a longer --ctx (this model has {})", most) : "");
  }
  if (const auto bad = validate(request.prompt, request.sampling, engine.engine->bounds())) {
    return naming_flags({ErrorCode::kInvalidInput, bad->message});
  }

  if (!flags.json && !flags.quiet) fmt::print("{}", prompt);
  Printer printer(flags.switch_every > 0);
  const InterruptScope interrupt;
  GenerationCallback show;
  if (!flags.json) show = [&](const RequestOutput& output) { printer(output); };
  const auto generated = generate(*engine.engine, std::move(request), show, interrupt.flag());
  if (!generated.ok()) return naming_flags(generated.error());
  const Generation& g = *generated;
  // What there is was asked for all the same; only the exit status tells that Ctrl-C ended it.
  Status ended = g.finish == FinishReason::kCancelled ? Status(Error{ErrorCode::kCancelled, ""}) : ok_status();
  if (flags.json) {
    print_json(flags, *loaded, g, engine.engine->stats(), *sampling.seed);
    return ended;
  }
  fmt::print("\n");
  std::fflush(stdout);
  if (!flags.quiet) {
    const EngineStats stats = engine.engine->stats();
    const std::string drafts = stats.drafted_tokens == 0 ? ""
                                                         : fmt::format(", of {} drafted tokens {} were right",
                                                                       stats.drafted_tokens, stats.accepted_tokens);
    log::say(
        "\n{}: {} prompt tokens, {} generated{}; first token {:.0f} ms, decode {:.1f} tokens/s; peak memory {}; one "
        "copy of the weights {}\n",
        policy, g.usage.prompt_tokens, g.usage.completion_tokens, drafts, g.times.ttft_s * 1e3,
        g.times.decode_tokens_per_s, human_bytes(process_memory().peak), human_bytes(loaded->model->weight_bytes()));
  }
  return ended;
}

}  // namespace

void add_generate(CLI::App& app, Status& status) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* verb = app.add_subcommand("generate", "Continue a prompt");
  verb->footer(
      "Examples:\n"
      "  nestedfp generate model.gguf -p 'The capital of France is' -n 40\n"
      "  nestedfp generate ./Llama-3.2-1B --precision fp8 -f prompt.txt --temperature 0.7\n"
      "  echo 'Once upon a time' | nestedfp generate model.gguf --switch-every 8");
  flags->model.add_to(*verb);
  auto* prompt = verb->add_option("-p,--prompt", flags->prompt, "the prompt");
  flags->prompt_option = prompt;
  flags->file_option = verb->add_option("-f,--file", flags->file, "read the prompt from a file")->excludes(prompt);
  SamplingParams fallback;
  fallback.temperature = 0;
  flags->sampling.add_to(*verb, fallback);
  flags->model.add_speculation(*verb);
  verb->add_option("--switch-every", flags->switch_every,
                   "change between FP16 and FP8 every N steps, and mark where (0 = never)")
      ->check(CLI::Range(0, 1 << 30));
  verb->add_flag("--json", flags->json, "print one JSON object with text, tokens, times and memory instead");
  verb->add_flag("-q,--quiet", flags->quiet, "print the generated text and nothing else");
  verb->callback([flags, verb, &status] {
    const bool exact = is_exact(flags->model.precision_value());
    if (exact && flags->switch_every == 0 && flags->model.speculative_tokens == 0) {
      warn_of_idle_fp8_flags(*verb, "--precision fp16");
    }
    status = run(*flags);
  });
}

}  // namespace nfp
