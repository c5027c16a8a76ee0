// nestedfp convert: a nested checkpoint from any model.
#include "io/convert.h"

#include <fmt/format.h>

#include <algorithm>

#include "flags.h"
#include "progress_bar.h"
#include "verbs.h"

namespace nfp {
namespace {

struct Flags {
  std::string source, destination;
  ConvertOptions options;
  double shard_gb = 5.0;
  int32_t threads = 0;
};

Status run(Flags flags) {
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(flags.source));
  ThreadPool threads(flags.threads > 0 ? flags.threads : std::max(1, ThreadPool::usable_cpus()));
  ConvertReport report;
  {
    ProgressBar bar;
    flags.options.progress = bar.callback();
    flags.options.shard_bytes = static_cast<uint64_t>(flags.shard_gb * 1e9);
    NFP_ASSIGN_OR_RETURN(report, convert(*source, flags.destination, flags.options, threads));
  }
  fmt::print("{}: {} matrices nested ({} rows with an exponent), {} dense, {}\n", flags.destination, report.nested,
             report.rows_shifted, report.dense, human_bytes(report.bytes));
  if (report.inexact > 0) {
    fmt::print("{} BF16 weights did not convert exactly; `nestedfp inspect {}` shows where\n", report.inexact,
               flags.source);
  }
  return ok_status();
}

}  // namespace

void add_convert(CLI::App& app, Status& status) {
  auto flags = std::make_shared<Flags>();
  CLI::App* verb = app.add_subcommand("convert", "Write a model as a nested checkpoint");
  verb->footer(
      "The checkpoint is one copy of the weights that runs in FP16 and in FP8; engines that read compressed-tensors "
      "load\n"
      "it as an FP8 model. `nestedfp restore` gives the original back. Examples:\n"
      "  nestedfp convert Qwen/Qwen3-8B qwen3-8b-nested\n"
      "  nestedfp convert model.gguf model-nested --force");
  verb->add_option("SRC", flags->source,
                   "Hugging Face directory, .gguf file, or org/name in the local Hugging Face cache")
      ->required();
  verb->add_option("DST", flags->destination, "directory to write")->required();
  verb->add_flag("--force", flags->options.force, "replace DST if it exists");
  verb->add_option("--shard-gb", flags->shard_gb, "largest size of a file, in GB")
      ->check(CLI::Range(0.001, 1000.0))
      ->capture_default_str();
  verb->add_option("--threads", flags->threads, "threads; 0 = as many as there are CPUs")->check(CLI::Range(0, 1024));
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
