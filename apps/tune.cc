// nestedfp tune: which GPU kernel runs which product of a model.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <system_error>

#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/gemm/tune/check.h"
#include "backend/cuda/gemm/tune/tune_plan.h"
#include "base/atomic_file.h"
#include "base/log.h"
#include "model/config.h"
#include "report_file.h"
#include "tune/tune_steps.h"
#include "verbs.h"
#ifdef NFP_HAVE_CUDA
#include "backend/cuda/gemm/tune/tune.h"
#endif

namespace nfp {
namespace {

struct TuneFlags {
  std::string model;
  std::vector<std::string> shapes;
  std::string modes = "f16,e4m3";
  std::string tokens;
  std::string check = "35,4";
  std::string out = "gemm-choices.json";
  std::string log_tried;
  std::string table;
  std::string device = "H200";
  size_t candidates = 16;
  bool force = false;
  bool print = false;
};

using Progress = std::function<void(const std::string& line)>;

struct Plan {
  std::vector<cuda::GemmShape> shapes;  // apart from the model's steps
  std::vector<cuda::Mode> modes;
  std::vector<int> tokens;
  std::vector<int> checked;
};

constexpr int kMostChecked = 8192;  // tokens

Result<Plan> make_plan(const TuneFlags& flags) {
  Plan plan;
  if (flags.model.empty() && flags.shapes.empty())
    return error(ErrorCode::kUsage, "tune: name a MODEL, or shapes with --shape N,K");
  NFP_ASSIGN_OR_RETURN(plan.modes, cuda::parse_modes(flags.modes));
  if (flags.tokens.empty()) {
    plan.tokens.assign(cuda::kTokenBuckets.begin(), cuda::kTokenBuckets.end());
  } else {
    NFP_ASSIGN_OR_RETURN(plan.tokens, cuda::parse_buckets(flags.tokens));
  }
  NFP_ASSIGN_OR_RETURN(const cuda::RandomTokens random, cuda::parse_random_tokens(flags.check));
  int most = flags.tokens.empty() ? kMostChecked : plan.tokens.back();
  for (const std::string& text : flags.shapes) {
    NFP_ASSIGN_OR_RETURN(const cuda::GemmShape shape, cuda::parse_shape(text));
    plan.shapes.push_back(shape);
  }
  if (flags.model.empty()) {
    plan.checked = cuda::untuned_tokens(random.seed, random.count, most, plan.tokens);
    return plan;
  }
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, read_tuned_config(flags.model));
  most = std::min(most, std::max(kMostDecoded, config.max_context));
  plan.checked = cuda::untuned_tokens(random.seed, random.count, most, plan.tokens);
  if (flags.tokens.empty()) std::erase_if(plan.tokens, [&](int tokens) { return tokens > most; });
  if (!flags.print) {
    NFP_RETURN_IF_ERROR(check_tuned_steps(
        flags.model, config,
        {.modes = plan.modes, .tokens = plan.tokens, .checked = plan.checked, .progress = {}, .tried = {}}));
    return plan;
  }
  for (const cuda::GemmShape& shape :
       cuda::layer_shapes({config.hidden, config.heads, config.kv_heads, config.head_dim, config.intermediate})) {
    if (std::find(plan.shapes.begin(), plan.shapes.end(), shape) == plan.shapes.end()) plan.shapes.push_back(shape);
  }
  return plan;
}

// What an H100 or H200 would run, from --table or the table that travels inside the program. Needs no GPU.
Status print_choices(const TuneFlags& flags, const Plan& plan) {
  cuda::TuningTable given;
  const cuda::DeviceShape device;
  const cuda::TuningTable* table = cuda::built_in_table(flags.device, device.sms);
  if (!flags.table.empty()) {
    NFP_ASSIGN_OR_RETURN(given, cuda::TuningTable::load(flags.table));
    table = &given;
  }
  for (const cuda::GemmShape& shape : plan.shapes) {
    for (const cuda::Mode mode : plan.modes) {
      for (const int m : plan.tokens) {
        const cuda::Problem problem{m, shape.n, shape.k, mode, false};
        const cuda::Choice choice = cuda::choose(problem, device, table, cuda::Reduction::kFastest);
        fmt::print("{}\n", cuda::describe(problem, choice, device));
      }
    }
  }
  return ok_status();
}

#ifdef NFP_HAVE_CUDA
// A line of --log-tried, which bench/fit_gemm_model.py --steps reads; times in microseconds.
std::string line_of(const std::string& model, const TriedKernels& tried) {
  nlohmann::ordered_json us = nlohmann::ordered_json::object();
  for (size_t i = 0; i < tried.configs.size(); ++i) {
    us[to_string(tried.configs[i])] = std::round(tried.seconds[i] * 1e8) / 100;
  }
  const nlohmann::ordered_json line = {{"model", std::filesystem::path(model).filename().string()},
                                       {"mode", cuda::name_of(tried.mode)},
                                       {"tokens", tried.tokens},
                                       {"n", tried.n},
                                       {"k", tried.k},
                                       {"layers", tried.layers},
                                       {"step_us", us}};
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

Result<cuda::Tuned> tune_shapes(const TuneFlags& flags, const Plan& plan, const Progress& progress) {
  NFP_ASSIGN_OR_RETURN(const cuda::Gemm gemm, cuda::Gemm::create());
  cuda::TuneOptions options;
  options.modes = plan.modes;
  options.tokens = plan.tokens;
  options.checked = plan.checked;
  options.most_candidates = flags.candidates;
  options.progress = progress;
  return cuda::tune(gemm, plan.shapes, options);
}

Status measure(const TuneFlags& flags, const Plan& plan) {
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create_output(flags.out));  // before minutes of measuring
  std::optional<AtomicFile> log;
  if (!flags.log_tried.empty()) {
    NFP_ASSIGN_OR_RETURN(log, AtomicFile::create_output(flags.log_tried));
  }
  std::string log_lines;
  size_t done = 0;
  const size_t all = ((flags.model.empty() ? 0 : 1) + plan.shapes.size()) * plan.modes.size() *
                     (plan.tokens.size() + plan.checked.size());
  const Progress progress = [&](const std::string& line) { log::say("[{}/{}] {}\n", ++done, all, line); };
  cuda::TuningTable table;
  std::vector<std::string> lines;
  const auto add = [&](const cuda::Tuned& tuned, const char* what) {
    table.device = tuned.table.device;
    table.fill_from(tuned.table);
    for (const std::string& line : tuned.check.lines()) lines.push_back(fmt::format("{} {}", what, line));
  };
  if (!flags.model.empty()) {
    NFP_ASSIGN_OR_RETURN(const cuda::Tuned steps, tune_steps(flags.model, {.modes = plan.modes,
                                                                           .tokens = plan.tokens,
                                                                           .checked = plan.checked,
                                                                           .candidates = flags.candidates,
                                                                           .progress = progress,
                                                                           .tried = [&](const TriedKernels& tried) {
                                                                             log_lines += line_of(flags.model, tried);
                                                                           }}));
    add(steps, "steps,");
  }
  if (!plan.shapes.empty()) {
    NFP_ASSIGN_OR_RETURN(const cuda::Tuned shapes, tune_shapes(flags, plan, progress));
    add(shapes, "products,");
  }
  if (log) {
    NFP_RETURN_IF_ERROR(log->write(log_lines));
    NFP_RETURN_IF_ERROR(log->commit());
  }
  NFP_RETURN_IF_ERROR(file.write(table.dump()));
  NFP_RETURN_IF_ERROR(file.commit());
  fmt::print("{}: choices for {} shapes and precisions on {}; use them with --gemm-choices {}\n", flags.out,
             table.size(), table.device, flags.out);
  if (!lines.empty()) fmt::print("checked with {} tokens, which were not tuned:\n", fmt::join(plan.checked, ", "));
  for (const std::string& line : lines) fmt::print("  {}\n", line);
  return ok_status();
}
#else
Status measure(const TuneFlags&, const Plan&) {
  return error(ErrorCode::kUnsupported,
               "tune: this nestedfp was built without CUDA; build it where nvcc 13 is installed (-DNFP_CUDA=ON), or "
               "show the choices that travel with it with --print");
}
#endif

Status run(const TuneFlags& flags) {
  NFP_ASSIGN_OR_RETURN(const Plan plan, make_plan(flags));
  if (flags.print) return print_choices(flags, plan);
  NFP_RETURN_IF_ERROR(
      check_no_overlap({{"--out", flags.out}, {"--log-tried", flags.log_tried}}, {{"MODEL", flags.model}}));
  std::error_code unknown;  // a path that nothing can be found out about cannot be written to either, which says why
  if (!flags.force && std::filesystem::exists(flags.out, unknown))
    return error(ErrorCode::kUsage, "{} exists; choose another --out, or replace it with --force", flags.out);
  return measure(flags, plan);
}

}  // namespace

void add_tune(CLI::App& app, Status& status) {
  auto flags = std::make_shared<TuneFlags>();
  CLI::App* verb = app.add_subcommand("tune", "Time a model's steps with other GPU kernels and keep the fastest");
  verb->footer(
      "MODEL: each product of its layers runs with the likeliest kernels in captured steps of some layers, which take\n"
      "turns. Weights are random, so a config.json is enough. --shape: a product by itself, for other programs.\n"
      "Needs an H100 or H200 and takes some minutes; --print needs no GPU. Examples:\n"
      "  nestedfp tune ./Llama-3.1-8B --out llama-h200.json\n"
      "  nestedfp serve ./Llama-3.1-8B --gemm-choices llama-h200.json\n"
      "  nestedfp tune --shape 4096,14336 --tokens 1,16 --modes f16\n"
      "  nestedfp tune ./Llama-3.1-8B --print --table llama-h200.json");
  verb->add_option("MODEL", flags->model,
                   "tune its steps: config.json or a folder with one, Hugging Face directory, nested checkpoint, .gguf "
                   "file, or org/name");
  verb->add_option("--shape", flags->shapes, "N,K: output and input features; may be given again")
      ->allow_extra_args(false);
  verb->add_option("--modes", flags->modes,
                   "f16 (FP16 steps), e4m3 (fp8-w8a8), w8a16 (fp8); for a --shape also bf16, e4m3-promoted")
      ->capture_default_str();
  verb->add_option("--tokens", flags->tokens,
                   "token counts, with commas: sequences that decode up to 256, beyond a prompt (default: every size "
                   "that is kept, of those that the model's context holds)");
  verb->add_option(
          "--check", flags->check,
          "SEED,COUNT: then, at so many random numbers of tokens that were not tuned (log-uniform in 1 to 8192, "
          "or the most of --tokens or the model's context), time what is chosen beside the likeliest others, "
          "print the mean and the worst of its time over the fastest's, and keep the fastest where it is 3 % "
          "faster twice (0.3 % of a model's step); COUNT 0: no check")
      ->capture_default_str();
  verb->add_option("--candidates", flags->candidates, "kernels to time for each product, likeliest first")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  verb->add_option("--out", flags->out, "file to write")->capture_default_str();
  auto* log = verb->add_option("--log-tried", flags->log_tried,
                               "file for the time of every kernel that was tried in MODEL's steps, as JSON lines; "
                               "replaced if it is there");
  verb->add_flag("--force", flags->force, "replace the file if it is there");
  auto* print = verb->add_flag("--print", flags->print, "measure nothing: show what would run on --device");
  print->excludes(log);
  auto* table = verb->add_option("--table", flags->table, "with --print: choices to read instead of the built-in ones");
  table->needs(print);
  verb->add_option("--device", flags->device, "with --print: whose built-in choices")
      ->check(CLI::IsMember({"H100", "H200"}))
      ->capture_default_str()
      ->needs(print)
      ->excludes(table);
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
