// nestedfp pull: a model from the Hugging Face hub into its cache.
#include "hub/pull.h"

#include <fmt/format.h>

#include <memory>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "download_bar.h"
#include "flags.h"
#include "interrupt.h"
#include "io/text_model.h"
#include "model/config.h"
#include "verbs.h"

namespace nfp {
namespace {

struct PullFlags {
  std::string model;
  std::string revision;
  std::string file;
  int jobs = 4;
  bool dry_run = false;
  bool any = false;
};

// That the weights are worth their download: the configuration is one that we run, and there is a tokenizer.
Status check_model(const std::string& snapshot) {
  NFP_ASSIGN_OR_RETURN(const std::string json, read_text_file(snapshot + "/config.json", size_t{16} << 20));
  NFP_ASSIGN_OR_RETURN(const auto text, text_model_config(json, snapshot + "/config.json"));
  const auto config = parse_config(text ? *text : json, snapshot + "/config.json");
  Status status = config.ok() ? ok_status() : Status(config.error());
  if (status.ok() && !read_text_file(snapshot + "/tokenizer.json").ok() &&
      !read_text_file(snapshot + "/tokenizer.gguf").ok()) {
    status = error(ErrorCode::kUnsupported, "{}: has no tokenizer.json", snapshot);
  }
  if (status.ok()) return status;
  return error(status.error().code, "{}; its weights were not downloaded (--any downloads them all the same)",
               status.error().message);
}

Status run(const PullFlags& flags) {
  auto name = parse_hub_name(flags.model);
  if (!name) {
    return error(ErrorCode::kUsage,
                 "pull {}: a model of the hub is called org/name (also org/name@REVISION, org/name:FILE)", flags.model);
  }
  const bool names_revision = flags.model.substr(0, flags.model.find(':')).find('@') != std::string::npos;
  if (!flags.revision.empty() && names_revision && name->revision != flags.revision) {
    return error(ErrorCode::kUsage, "pull {}: --revision {} is another one", flags.model, flags.revision);
  }
  if (!flags.file.empty() && !name->file.empty() && name->file != flags.file) {
    return error(ErrorCode::kUsage, "pull {}: --file {} is another one", flags.model, flags.file);
  }
  if (!flags.revision.empty()) name->revision = flags.revision;
  if (!flags.file.empty()) name->file = flags.file;
  for (const auto& [flag, value] : {std::pair("--revision", name->revision), std::pair("--file", name->file)}) {
    if (!value.empty() && !is_plain_relative_path(value)) {
      return error(ErrorCode::kUsage, "{} {}: is not a name on the hub", flag, value);
    }
  }
  PullOptions options;
  NFP_ASSIGN_OR_RETURN(options.access, hub_access());
  options.cache = hub_cache();
  options.jobs = flags.jobs;
  options.dry_run = flags.dry_run;
  if (!flags.any) options.check = check_model;
  const InterruptScope interrupt;
  options.stop = interrupt.flag();
  PulledModel pulled;
  {
    DownloadBar bar;
    options.progress = bar.callback();
    NFP_ASSIGN_OR_RETURN(pulled, pull(*name, options));
  }
  if (flags.dry_run) {
    for (const HubFile& file : pulled.files) fmt::print("{:>12}  {}\n", human_bytes(file.size), file.path);
    fmt::print("{:>12}  in all, commit {}\n", human_bytes(pulled.bytes), pulled.commit);
    return ok_status();
  }
  fmt::print("{}\n", pulled.path);
  log::say("{}: {} files, {} ({} of them fetched now). Next: nestedfp chat {}\n", name->text(), pulled.files.size(),
           human_bytes(pulled.bytes), human_bytes(pulled.fetched), pulled.name.text());
  return ok_status();
}

}  // namespace

void add_pull(CLI::App& app, Status& status) {
  auto flags = std::make_shared<PullFlags>();
  CLI::App* verb = app.add_subcommand("pull", "Download a model into the Hugging Face cache");
  verb->footer(
      "Takes what serving needs and leaves the rest; goes on where it was interrupted; checks every file's checksum.\n"
      "HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_CACHE mean what they mean to Hugging Face's own clients.\n"
      "Examples:\n"
      "  nestedfp pull Qwen/Qwen2.5-0.5B-Instruct\n"
      "  nestedfp pull org/name --file name.Q4_1.gguf      # then: nestedfp chat org/name:name.Q4_1.gguf");
  verb->add_option("MODEL", flags->model, "org/name, also org/name@REVISION, org/name:FILE.gguf or both")->required();
  verb->add_option("--revision", flags->revision, "branch, tag or commit; default: main");
  verb->add_option("--file", flags->file,
                   "a GGUF file of the repository, with all its parts, instead of its safetensors");
  verb->add_option("--jobs", flags->jobs, "files to download at a time")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  verb->add_flag("--dry-run", flags->dry_run, "list the files that would be there, and download no weights");
  verb->add_flag("--any", flags->any, "download also what this program cannot run");
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
