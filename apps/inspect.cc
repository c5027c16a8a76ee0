// nestedfp inspect: what is in a model and how it takes to the nested format.
#include "io/inspect.h"

#include <fmt/format.h>

#include <algorithm>

#include "flags.h"
#include "progress_bar.h"
#include "verbs.h"

namespace nfp {
namespace {

struct Flags {
  std::string model;
  bool json = false;
  int32_t threads = 0;
};

Status run(const Flags& flags) {
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(flags.model));
  ThreadPool threads(flags.threads > 0 ? flags.threads : std::max(1, ThreadPool::usable_cpus()));
  InspectReport report;
  {
    ProgressBar bar;
    NFP_ASSIGN_OR_RETURN(report, inspect(*source, threads, bar.callback()));
  }
  fmt::print("{}", flags.json ? inspect_json(report) : inspect_text(report));
  return ok_status();
}

}  // namespace

void add_inspect(CLI::App& app, Status& status) {
  auto flags = std::make_shared<Flags>();
  CLI::App* verb = app.add_subcommand("inspect", "Show what is in a model and what FP8 will do to it");
  verb->footer(
      "Tells which matrices the paper's rule nests, which row exponents add, which stay dense and why; how exactly "
      "BF16\n"
      "weights convert; and whether FP8 suits the model. Examples:\n"
      "  nestedfp inspect model.gguf\n"
      "  nestedfp inspect Qwen/Qwen3-8B --json");
  verb->add_option("MODEL", flags->model,
                   "Hugging Face directory, nested checkpoint, .gguf file, or org/name in the local Hugging Face cache")
      ->required();
  verb->add_flag("--json", flags->json, "print one JSON object, with every matrix");
  verb->add_option("--threads", flags->threads, "threads; 0 = as many as there are CPUs")->check(CLI::Range(0, 1024));
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
