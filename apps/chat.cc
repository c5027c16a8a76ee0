// nestedfp chat: a conversation on the terminal.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/process_memory.h"
#include "flags.h"
#include "interrupt.h"
#include "line_reader.h"
#include "runtime/chat_session.h"
#include "text/utf8.h"
#include "verbs.h"

namespace nfp {
namespace {

constexpr const char* kHelp =
    "/reset            forget the conversation\n"
    "/precision NAME   fp16, fp8, fp8-w8a8, threshold:TOKENS or alternate:STEPS, from the next answer on\n"
    "/stats            speed, precision and memory so far\n"
    "/help             this list\n"
    "/quit             leave (so does Ctrl-D); Ctrl-C stops an answer\n";

struct ChatFlags {
  ModelFlags model;
  SamplingFlags sampling;
  std::string system;
};

void print_stats(const Engine& engine, const LoadedModel& loaded, const std::optional<Generation>& last) {
  const EngineStats stats = engine.stats();
  if (last) {
    fmt::print(
        "last answer: {} prompt tokens ({} from the cache), {} generated ({} FP16, {} FP8); first token {:.0f} ms, "
        "decode {:.1f} tokens/s\n",
        last->usage.prompt_tokens, last->usage.cached_tokens, last->usage.completion_tokens,
        last->usage.completion.fp16, last->usage.completion.fp8, last->times.ttft_s * 1e3,
        last->times.decode_tokens_per_s);
  }
  fmt::print("policy {}; {} steps, {} precision switches; context {} tokens\n", engine.policy().name(), stats.steps,
             stats.precision_switches, engine.bounds().max_context);
  fmt::print("weights {} (one copy), memory {} now, {} at most\n", human_bytes(loaded.model->weight_bytes()),
             human_bytes(process_memory().resident), human_bytes(process_memory().peak));
}

// False when the conversation is over.
bool command(const std::string& line, ChatSession& session, Engine& engine, const LoadedModel& loaded, Precision fp8,
             const std::optional<Generation>& last) {
  const size_t space = line.find(' ');
  const std::string verb = line.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
  if (verb == "/quit" || verb == "/exit") return false;
  if (verb == "/reset") {
    session.reset();
    fmt::print("(conversation forgotten)\n");
  } else if (verb == "/stats") {
    print_stats(engine, loaded, last);
  } else if (verb == "/precision") {
    auto policy = parse_policy(rest, fp8, /*shares=*/false);
    if (policy.ok() && (*policy)->needs_sensitivity()) {
      fmt::print("policy {} needs an order of sensitivity, which only nestedfp serve loads\n", (*policy)->name());
    } else if (policy.ok()) {
      fmt::print("(precision {})\n", (*policy)->name());
      engine.set_policy(std::move(policy).value());
    } else {
      fmt::print("{}\n", policy.error().message);
    }
  } else {
    if (verb != "/help") fmt::print("unknown command {}\n", verb);
    fmt::print("{}", kHelp);
  }
  return true;
}

Status run(const ChatFlags& flags) {
  NFP_RETURN_IF_ERROR(flags.sampling.check());
  if (!text::is_utf8(flags.system)) return error(ErrorCode::kUsage, "--system is not UTF-8");
  const Precision precision = flags.model.precision_value();
  const Precision fp8 = is_exact(precision) ? Precision::kFp8 : precision;
  NFP_ASSIGN_OR_RETURN(auto policy, parse_policy(flags.model.precision, fp8));
  SamplingParams sampling;
  NFP_ASSIGN_OR_RETURN(const auto loaded, flags.model.load(false, 0, "--ctx", [&](const LoadedModel& opened) -> Status {
    NFP_ASSIGN_OR_RETURN(sampling, flags.sampling.of_model(*opened.source));
    NFP_RETURN_IF_ERROR(load_chat_template(opened, /*has_tools=*/false));
    return ok_status();
  }));
  EngineConfig config = flags.model.engine_config();
  config.fp8 = fp8;
  NFP_ASSIGN_OR_RETURN(ServingEngine engine, make_engine(*loaded, std::move(config), std::move(policy)));
  NFP_ASSIGN_OR_RETURN(ChatSession session, ChatSession::create(*loaded, *engine.engine, flags.system));

  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  Status failed = ok_status();
  if (terminal) fmt::print("{} in {}; /help lists commands\n", flags.model.model, flags.model.precision);
  LineReader reader("> ");
  std::optional<Generation> last;
  for (;;) {
    NFP_ASSIGN_OR_RETURN(const std::optional<std::string> line, reader.next());
    if (!line) break;
    if (line->empty()) continue;
    if (line->front() == '/') {
      if (!command(*line, session, *engine.engine, *loaded, fp8, last)) break;
      continue;
    }
    // A script has the exit status alone.
    const auto fail = [&](ErrorCode code) {
      if (!terminal && failed.ok()) failed = Error{code, ""};
    };
    if (!text::is_utf8(*line)) {
      log::say("nestedfp: error: the line is not UTF-8, and was left out\n");
      fail(ErrorCode::kInvalidInput);
      continue;
    }
    const InterruptScope interrupt;
    auto answer = session.say(
        *line, sampling,
        [](const RequestOutput& output) {
          fmt::print("{}", output.text);
          std::fflush(stdout);
        },
        interrupt.flag());
    fmt::print("\n");
    if (!answer.ok()) {
      log::say("nestedfp: error: {}\n", naming_flags(answer.error()).message);
      if (answer.error().code == ErrorCode::kInvalidInput) log::say("(/reset starts a new conversation)\n");
      fail(answer.error().code);
      continue;
    }
    if (answer->finish == FinishReason::kCancelled) fmt::print("(stopped)\n");
    last = std::move(answer).value();
  }
  if (terminal) fmt::print("\n");
  return failed;
}

}  // namespace

void add_chat(CLI::App& app, Status& status) {
  auto flags = std::make_shared<ChatFlags>();
  CLI::App* verb = app.add_subcommand("chat", "Talk with a model");
  verb->footer(std::string("In the conversation:\n") + kHelp +
               "\nExample:\n  nestedfp chat model.gguf --system 'Answer in one sentence.'");
  flags->model.add_to(*verb);
  flags->model.add_speculation(*verb);
  verb->add_option("--system", flags->system, "the system message");
  SamplingParams fallback;
  fallback.temperature = 0.7f;
  fallback.top_k = 40;
  fallback.top_p = 0.95f;
  fallback.min_p = 0.05f;
  flags->sampling.add_to(*verb, fallback);
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
