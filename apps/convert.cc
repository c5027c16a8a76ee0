// nestedfp convert and restore: between ordinary checkpoints and nested ones.
#include "io/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/byte_size.h"
#include "base/cpu_topology.h"
#include "base/log.h"
#include "base/stop_signals.h"
#include "calibrate/calibrate.h"
#include "calibrate/estimate.h"
#include "flags.h"
#include "io/model_source.h"
#include "model/weight_loader.h"
#include "progress_bar.h"
#include "verbs.h"

namespace nfp {
namespace {

constexpr const char* kAuto = "auto";  // of --calibrate: self where that is quick
constexpr double kQuickSeconds = 60;

struct ConvertFlags {
  std::string source;
  std::string destination;
  bool force = false;
  int threads = 0;
  double shard_gb = 5.0;
  ModelFlags calibration;  // only what --calibrate and its like set

  ConvertFlags() { calibration.calibrate = kAuto; }

  void add_to(CLI::App& verb) {
    verb.add_option("DST", destination, "directory to write")->required();
    verb.add_flag("--force", force, "replace DST if it is there");
    verb.add_option("--shard-gb", shard_gb, "largest safetensors file, in GB")
        ->check(CLI::Range(0.001, 1000.0))
        ->capture_default_str();
    verb.add_option("--threads", threads, "threads; 0 = as many as this process may use")
        ->check(CLI::Range(0, 1024))
        ->capture_default_str();
  }
  ConvertOptions options() const {
    ConvertOptions options;
    options.force = force;
    options.shard_bytes = static_cast<uint64_t>(shard_gb * 1e9);
    return options;
  }
  int thread_count() const { return threads > 0 ? threads : usable_cpu_count(); }
};

// What --calibrate auto means here: self where a flag says how to calibrate, it takes under a minute, or was made
// before; else nothing and a word about it. A checkpoint that has its uppers keeps them.
std::string decide(const ConvertFlags& flags, const ModelSource& source, ThreadPool& threads,
                   const ProgressCallback& progress) {
  if (flags.calibration.calibrate != kAuto) return flags.calibration.calibrate;
  const auto config = parse_config(source.config_json(), source.path() + ": config.json");
  const bool nested = std::any_of(source.tensors().begin(), source.tensors().end(),
                                  [](const TensorInfo& tensor) { return tensor.stored == "nested"; });
  if (!config.ok() || nested || source.stored_fp8()) return "none";
  // The rate that is measured below depends on how busy the machine is; what was asked for does not.
  if (!flags.calibration.calibration_flag().empty()) return kSelfText;
  CalibrationOptions options = flags.calibration.calibration_options();
  options.text = kSelfText;
  const double seconds = estimate_calibration(*config, options, threads);
  if (seconds <= kQuickSeconds) return kSelfText;
  options.threads = flags.threads;
  options.progress = progress;
  if (is_calibrated(source, options)) return kSelfText;
  log::say("--calibrate self would bring FP8 closer to FP16; here it would take about {:.0f} minutes\n",
           std::ceil(seconds / 60));
  return "none";
}

// Calibrates before anything is written; what was done already is in the user's cache. Smoothing puts the smoothed
// model in `source`'s place.
Status add_calibration(const ConvertFlags& flags, std::unique_ptr<ModelSource>& source, ThreadPool& threads,
                       ConvertOptions& options) {
  CalibrationOptions calibration = flags.calibration.calibration_options();
  calibration.threads = flags.threads;
  calibration.progress = options.progress;
  NFP_ASSIGN_OR_RETURN(const Calibration made, calibrate(flags.source, calibration));
  options.uppers = made.rule;
  options.calibration = made.to_json();
  if (made.scalings) {
    NFP_ASSIGN_OR_RETURN(source, scale_source(std::move(source), *made.scalings));
  }
  options.matrix = [&source = *source, &threads,
                    filter = made.filter()](const std::string& name) -> Result<std::unique_ptr<MatrixReader>> {
    NFP_ASSIGN_OR_RETURN(auto reader, source.matrix(name, threads));
    return filter(name, std::move(reader));
  };
  return ok_status();
}

Status run_convert(ConvertFlags flags) {
  const StopRemovesTemporaries stop;
  NFP_ASSIGN_OR_RETURN(auto source, ModelSource::open(flags.source));
  ThreadPool threads(flags.thread_count());
  ConvertReport report;
  {
    ProgressBar bar;
    ConvertOptions options = flags.options();
    options.progress = bar.callback();
    const bool asked = flags.calibration.calibrate != kAuto || !flags.calibration.calibration_flag().empty();
    flags.calibration.calibrate = decide(flags, *source, threads, options.progress);
    NFP_RETURN_IF_ERROR(flags.calibration.check_calibration());
    // Families that other engines alone know are converted too: what they imply is not known here.
    if (const auto config = parse_config(source->config_json(), source->path() + ": config.json"); config.ok()) {
      NFP_RETURN_IF_ERROR(check_complete(*source, *config));
    }
    NFP_RETURN_IF_ERROR(check_convert(*source, flags.destination, options));
    if (flags.calibration.calibrate != "none") {
      const Status calibrated = add_calibration(flags, source, threads, options);
      if (asked) NFP_RETURN_IF_ERROR(calibrated);
      if (!calibrated.ok()) log::warn("not calibrated: {}", calibrated.error().message);
    }
    NFP_ASSIGN_OR_RETURN(report, convert(*source, flags.destination, options, threads));
  }
  fmt::print("{}: {} matrices nested, {} linear layers kept dense, {}\n", flags.destination, report.nested,
             report.dense.size(), human_bytes(report.bytes));
  for (const std::string& name : report.dense) {
    const auto with = report.dense_with.find(name);
    fmt::print("  dense: {}{}\n", name,
               with == report.dense_with.end()
                   ? ""
                   : fmt::format(" (engines multiply it together with {}, which does not nest)", with->second));
  }
  return ok_status();
}

Status run_restore(const ConvertFlags& flags) {
  const StopRemovesTemporaries stop;
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(flags.source));
  ThreadPool threads(flags.thread_count());
  RestoreReport report;
  {
    ProgressBar bar;
    ConvertOptions options = flags.options();
    options.progress = bar.callback();
    NFP_ASSIGN_OR_RETURN(report, restore(*source, flags.destination, options, threads));
  }
  fmt::print("{}: {} tensors, {}\n", flags.destination, report.tensors, human_bytes(report.bytes));
  for (const std::string& name : report.inexact) {
    fmt::print("  not bit for bit: {} (BF16 or FP32 values that FP16 cannot hold; the nearest are written)\n", name);
  }
  return ok_status();
}

}  // namespace

void add_convert(CLI::App& app, Status& status) {
  auto flags = std::make_shared<ConvertFlags>();
  CLI::App* verb = app.add_subcommand("convert", "Write a nested checkpoint");
  verb->footer(
      "The directory that is written loads in engines that know compressed-tensors as a plain FP8 model, and here in "
      "both\n"
      "precisions. Converting first is optional: every verb takes the original model too. Example:\n"
      "  nestedfp convert ./Llama-3.2-1B ./Llama-3.2-1B-nested\n"
      "  nestedfp convert ./Llama-3.2-1B ./Llama-3.2-1B-nested --calibrate self");
  verb->add_option("SRC", flags->source, "Hugging Face directory, .gguf file, or org/name in the local cache")
      ->required();
  flags->add_to(*verb);
  add_calibration_flags(*verb, flags->calibration);
  verb->get_option("--calibrate")
      ->description(
          "choose the FP8 neighbour of every weight so that FP8 is closest to FP16, which stays exact: self (on text "
          "that the model writes), a text file, none, or auto: self where another flag says how to, where that takes "
          "under a minute, or where it was done before");
  verb->callback([flags, &status] { status = run_convert(*flags); });
}

void add_restore(CLI::App& app, Status& status) {
  auto flags = std::make_shared<ConvertFlags>();
  CLI::App* verb = app.add_subcommand("restore", "Write a nested checkpoint's original FP16 or BF16 weights back");
  verb->footer("Example:\n  nestedfp restore ./Llama-3.2-1B-nested ./Llama-3.2-1B-again");
  verb->add_option("SRC", flags->source, "nested checkpoint, as convert wrote it")->required();
  flags->add_to(*verb);
  verb->callback([flags, &status] { status = run_restore(*flags); });
}

}  // namespace nfp
