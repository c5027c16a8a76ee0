// nestedfp tune: which GPU kernel runs which product of a model.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/gemm/tune/tune_plan.h"
#include "base/atomic_file.h"
#include "io/model_source.h"
#include "model/config.h"
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
  std::string out = "gemm-choices.json";
  std::string table;
  std::string device = "H200";
  int candidates = 40;
  bool force = false;
  bool print = false;
};

struct Plan {
  std::vector<cuda::GemmShape> shapes;
  std::vector<cuda::Mode> modes;
  std::vector<int> tokens;
};

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
  for (const std::string& text : flags.shapes) {
    NFP_ASSIGN_OR_RETURN(const cuda::GemmShape shape, cuda::parse_shape(text));
    plan.shapes.push_back(shape);
  }
  if (!flags.model.empty()) {
    NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(flags.model));
    NFP_ASSIGN_OR_RETURN(const ModelConfig config,
                         parse_config(source->config_json(), source->path() + ": config.json"));
    for (const cuda::GemmShape& shape :
         cuda::layer_shapes({config.hidden, config.heads, config.kv_heads, config.head_dim, config.intermediate})) {
      if (std::find(plan.shapes.begin(), plan.shapes.end(), shape) == plan.shapes.end()) plan.shapes.push_back(shape);
    }
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
Status measure(const TuneFlags& flags, const Plan& plan) {
  NFP_ASSIGN_OR_RETURN(const cuda::Gemm gemm, cuda::Gemm::create());
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(flags.out));  // before minutes of measuring
  cuda::TuneOptions options;
  options.modes = plan.modes;
  options.tokens = plan.tokens;
  options.most_candidates = flags.candidates;
  size_t done = 0;
  const size_t all = plan.shapes.size() * plan.modes.size() * plan.tokens.size();
  options.progress = [&](const std::string& line) { fmt::print(stderr, "[{}/{}] {}\n", ++done, all, line); };
  NFP_ASSIGN_OR_RETURN(const cuda::TuningTable table, cuda::tune(gemm, plan.shapes, options));
  NFP_RETURN_IF_ERROR(file.write(table.dump()));
  NFP_RETURN_IF_ERROR(file.commit());
  fmt::print("{}: {} choices for {}\n", flags.out, all, table.device);
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
  if (!flags.force && std::filesystem::exists(flags.out))
    return error(ErrorCode::kUsage, "{} exists; choose another --out, or replace it with --force", flags.out);
  return measure(flags, plan);
}

}  // namespace

void add_tune(CLI::App& app, Status& status) {
  auto flags = std::make_shared<TuneFlags>();
  CLI::App* verb = app.add_subcommand("tune", "Time GPU kernels for a model's shapes and keep the fastest");
  verb->footer(
      "Tuning needs an H100 or H200 and takes seconds a shape; --print needs no GPU. Examples:\n"
      "  nestedfp tune ./Llama-3.1-8B --out llama-h200.json\n"
      "  nestedfp serve ./Llama-3.1-8B --gemm-choices llama-h200.json\n"
      "  nestedfp tune --shape 4096,14336 --tokens 1,16 --modes f16\n"
      "  nestedfp tune ./Llama-3.1-8B --print --table llama-h200.json");
  verb->add_option("MODEL", flags->model,
                   "tune its layers: Hugging Face directory, nested checkpoint, .gguf file, or org/name");
  verb->add_option("--shape", flags->shapes, "N,K: output and input features; may be given again")
      ->allow_extra_args(false);
  verb->add_option("--modes", flags->modes, "of f16, bf16, e4m3, e4m3-promoted, w8a16")->capture_default_str();
  verb->add_option("--tokens", flags->tokens, "token counts, with commas (default: every size that is kept)");
  verb->add_option("--candidates", flags->candidates, "kernels to time for each product, likeliest first")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  verb->add_option("--out", flags->out, "file to write")->capture_default_str();
  verb->add_flag("--force", flags->force, "replace the file if it is there");
  auto* print = verb->add_flag("--print", flags->print, "measure nothing: show what would run on --device");
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
