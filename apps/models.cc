// nestedfp models: what is in the Hugging Face cache, and whether it loads.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/process_memory.h"
#include "flags.h"
#include "hub/cache_list.h"
#include "io/hub_cache.h"
#include "json_output.h"
#include "runtime/model_summary.h"
#include "verbs.h"

namespace nfp {
namespace {

struct ModelsFlags {
  bool json = false;
  bool names = false;
};

nlohmann::ordered_json to_json(const CachedModel& model, const ModelSummary& summary) {
  return {{"name", model.name},
          {"path", model.path},
          {"bytes", model.bytes},
          {"architecture", summary.architecture},
          {"weights", summary.form},
          {"parameters", summary.parameters},
          {"memory_bytes", summary.fp16_bytes},
          {"loads", summary.loads.ok()},
          {"reason", summary.loads.ok() ? "" : summary.loads.error().message}};
}

Status run(const ModelsFlags& flags) {
  const std::string cache = hub_cache();
  std::error_code code;
  const std::filesystem::directory_iterator readable(cache, code);
  if (code && code != std::errc::no_such_file_or_directory) {
    return error(ErrorCode::kIo, "{}: cannot be read: {}; HF_HUB_CACHE and HF_HOME say where the cache is", cache,
                 code.message());
  }
  const CacheList list = list_hub_cache(cache);
  if (flags.names) {
    for (const CachedModel& model : list.models) fmt::print("{}\n", model.name);
    return ok_status();
  }
  std::vector<ModelSummary> summaries;
  for (const CachedModel& model : list.models) summaries.push_back(summarize_model(model.path));
  if (flags.json) {
    nlohmann::ordered_json models = nlohmann::ordered_json::array(), unfinished = nlohmann::ordered_json::array();
    for (size_t i = 0; i < list.models.size(); ++i) models.push_back(to_json(list.models[i], summaries[i]));
    for (const CachedDownload& left : list.unfinished) {
      unfinished.push_back({{"repository", left.repository}, {"bytes", left.bytes}});
    }
    const nlohmann::ordered_json out = {{"cache", cache}, {"models", models}, {"unfinished", unfinished}};
    print_indented(out);
    return ok_status();
  }
  if (list.models.empty()) fmt::print("no model in {}; nestedfp pull org/name downloads one\n", cache);
  size_t width = 5;
  for (const CachedModel& model : list.models) width = std::max(width, model.name.size());
  if (!list.models.empty()) {
    fmt::print("{:<{}}  {:>10}  {:<22}  {:<16}  {:>10}  {}\n", "model", width, "on disk", "family", "weights",
               "in memory", "loads");
  }
  const uint64_t available = available_memory();
  for (size_t i = 0; i < list.models.size(); ++i) {
    const ModelSummary& summary = summaries[i];
    std::string loads = summary.loads.ok() ? "yes" : "no: " + summary.loads.error().message;
    if (summary.loads.ok() && summary.fp16_bytes > available)
      loads += ", but only " + human_bytes(available) + " are free";
    fmt::print("{:<{}}  {:>10}  {:<22}  {:<16}  {:>10}  {}\n", list.models[i].name, width,
               human_bytes(list.models[i].bytes),
               summary.architecture.empty() ? "?" : log::without_controls(summary.architecture),
               summary.form.empty() ? "?" : summary.form,
               summary.fp16_bytes > 0 ? human_bytes(summary.fp16_bytes) : "?", log::without_controls(loads));
  }
  for (const CachedDownload& left : list.unfinished) {
    fmt::print("unfinished: {} ({} so far); nestedfp pull {} goes on\n", left.repository, human_bytes(left.bytes),
               left.repository);
  }
  return ok_status();
}

}  // namespace

void add_models(CLI::App& app, Status& status) {
  auto flags = std::make_shared<ModelsFlags>();
  CLI::App* verb = app.add_subcommand("models", "List the models in the Hugging Face cache and whether they load");
  verb->footer("Example:\n  nestedfp models\nHF_HUB_CACHE and HF_HOME say where the cache is.");
  auto* json = verb->add_flag("--json", flags->json, "print one JSON object");
  verb->add_flag("--names", flags->names, "print names only, without opening the models")->excludes(json);
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
