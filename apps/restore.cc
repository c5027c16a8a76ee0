// nestedfp restore: the plain checkpoint back from a nested one.
#include <fmt/format.h>

#include <algorithm>

#include "flags.h"
#include "io/convert.h"
#include "progress_bar.h"
#include "verbs.h"

namespace nfp {
namespace {

struct Flags {
  std::string source, destination;
  RestoreOptions options;
  double shard_gb = 5.0;
  int32_t threads = 0;
};

Status run(Flags flags) {
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(flags.source));
  ThreadPool threads(flags.threads > 0 ? flags.threads : std::max(1, ThreadPool::usable_cpus()));
  RestoreReport report;
  {
    ProgressBar bar;
    flags.options.progress = bar.callback();
    flags.options.shard_bytes = static_cast<uint64_t>(flags.shard_gb * 1e9);
    NFP_ASSIGN_OR_RETURN(report, restore(*source, flags.destination, flags.options, threads));
  }
  fmt::print("{}: {}, {}\n", flags.destination, human_bytes(report.bytes),
             report.same_files ? "in the original's files" : "newly laid out");
  if (report.inexact > 0) {
    fmt::print("{} BF16 weights are not those of the original: it had smaller values than FP16 keeps\n",
               report.inexact);
  }
  return ok_status();
}

}  // namespace

void add_restore(CLI::App& app, Status& status) {
  auto flags = std::make_shared<Flags>();
  CLI::App* verb = app.add_subcommand("restore", "Write a nested checkpoint back as plain safetensors");
  verb->footer(
      "FP16 weights come back bit for bit, BF16 ones where their conversion was exact (`nestedfp convert` says so).\n"
      "Example:\n"
      "  nestedfp restore qwen3-8b-nested qwen3-8b");
  verb->add_option("SRC", flags->source, "nested checkpoint")->required();
  verb->add_option("DST", flags->destination, "directory to write")->required();
  verb->add_flag("--force", flags->options.force, "replace DST if it exists");
  verb->add_option("--shard-gb", flags->shard_gb, "largest size of a file, in GB, where the layout is new")
      ->check(CLI::Range(0.001, 1000.0))
      ->capture_default_str();
  verb->add_option("--threads", flags->threads, "threads; 0 = as many as there are CPUs")->check(CLI::Range(0, 1024));
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
