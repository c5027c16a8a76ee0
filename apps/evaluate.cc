// nestedfp evaluate: how good a model is in each form of FP8.
#include "calibrate/evaluate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <optional>

#include "base/log.h"
#include "base/stop_signals.h"
#include "flags.h"
#include "progress_bar.h"
#include "report_file.h"
#include "status_line.h"
#include "verbs.h"

namespace nfp {
namespace {

struct EvaluateFlags {
  ModelFlags model;
  EvaluateOptions options;
  bool no_activations = false;
  bool shares_given = false;
  std::string html, json_file;
  bool json = false;
};

void print_table(const Evaluation& evaluation) {
  const double base = evaluation.forms.front().result.perplexity;
  fmt::print("{:<16} {:<23} {:>6} {:>12} {:>8} {:>9} {:>8} {:>9}\n", "weights", "activations", "in FP8", "perplexity",
             "change", "KL mean", "KL 99 %", "same top");
  for (const FormResult& form : evaluation.forms) {
    fmt::print("{:<16} {:<23} {:>4.0f} % {:>12.4f} {:>+6.2f} %", form.weights, form.activations, form.share * 100,
               form.result.perplexity, (form.result.perplexity / base - 1) * 100);
    if (form.result.kld) {
      fmt::print(" {:>9.5f} {:>8.4f} {:>7.2f} %", form.result.kld->mean, form.result.kld->p99,
                 form.result.kld->same_top * 100);
    }
    fmt::print("\n");
  }
}

// An evaluation takes hours, so the figures of each form are written when they are there.
Status write_figures(const std::string& path, const Evaluation& evaluation) {
  NFP_ASSIGN_OR_RETURN(std::optional<AtomicFile> file, open_report(path));
  return write_report(file, evaluation_to_json(evaluation) + "\n");
}

Status run(EvaluateFlags flags) {
  const StopRemovesTemporaries stop;
  NFP_RETURN_IF_ERROR(flags.model.check_calibration());
  LoadedModelOptions wanted;
  wanted.context_flag = flags.model.ctx_flag(flags.options.ctx);
  if (flags.model.ctx > 0) flags.options.ctx = flags.model.ctx;
  wanted.context = flags.options.ctx;
  NFP_RETURN_IF_ERROR(check_no_overlap(
      {{"--html", flags.html}, {"--json-file", flags.json_file}},
      {{"--file", flags.options.file}, {"MODEL", flags.model.model}, {"--calibrate", flags.model.calibrate}}));
  NFP_ASSIGN_OR_RETURN(flags.options.text, read_plain_text("--file", flags.options.file));
  NFP_ASSIGN_OR_RETURN(const auto known, outline(flags.model.model, wanted));
  if (flags.shares_given && flags.model.calibrate == "none") {
    NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(flags.model.model));
    if (!stored_sensitivity(*source).ok())
      return error(
          ErrorCode::kUsage,
          "--shares: which layers FP8 harms least is not known of this model; add --calibrate self or a text file");
  }
  NFP_ASSIGN_OR_RETURN(std::optional<AtomicFile> html, open_report(flags.html));
  NFP_RETURN_IF_ERROR(check_report(flags.json_file));
  NFP_RETURN_IF_ERROR(check_evaluation(*known, flags.options));
  flags.options.threads = flags.model.threads;
  flags.options.activations = !flags.no_activations;
  if (flags.model.calibrate != "none") {
    const bool plain = wants_weights(flags.options, kCalibratedForm);
    const bool smoothed = flags.model.calibrate_smooth && wants_weights(flags.options, kSmoothedForm);
    if (plain || smoothed) {
      flags.model.warn_of_calibration_text(flags.options.text);
    } else {
      log::warn("--calibrate: nothing is calibrated, as --forms asks for no form that would be");
    }
    ProgressBar bar;
    CalibrationOptions calibration = flags.model.calibration_options();
    calibration.progress = bar.callback();
    calibration.smooth = false;
    if (plain) {
      NFP_ASSIGN_OR_RETURN(flags.options.calibration, calibrate(flags.model.model, calibration));
    }
    if (smoothed) {
      calibration.smooth = true;
      calibration.measure_sensitivity = false;
      NFP_ASSIGN_OR_RETURN(flags.options.smoothed, calibrate(flags.model.model, calibration));
    }
  }
  const bool terminal = takes_escapes(STDERR_FILENO);
  flags.options.progress = [terminal](const std::string& form, int64_t chunk, int64_t chunks) {
    if (terminal) draw_status_line(fmt::format("{}: chunk {}/{}", form, chunk, chunks));
    if (!terminal && chunk == chunks) log::say("{}: done\n", form);
  };
  // A pipe or a device gets them once, at the end.
  if (output_is_replaced(flags.json_file)) {
    flags.options.measured = [&flags](const Evaluation& so_far) { return write_figures(flags.json_file, so_far); };
  }
  NFP_ASSIGN_OR_RETURN(const Evaluation evaluation, evaluate(flags.model.model, flags.options));
  if (terminal) clear_status_line();
  // First what cannot fail for a full disk.
  if (flags.json) {
    fmt::print("{}\n", evaluation_to_json(evaluation));
  } else {
    print_table(evaluation);
  }
  NFP_RETURN_IF_ERROR(write_report(html, evaluation_to_html(evaluation)));
  return write_figures(flags.json_file, evaluation);
}

}  // namespace

void add_evaluate(CLI::App& app, Status& status) {
  auto flags = std::make_shared<EvaluateFlags>();
  CLI::App* verb = app.add_subcommand("evaluate", "Measure a model in each form of FP8 against its own FP16");
  verb->footer(
      "Compares nested FP8 (rounded to nearest, calibrated, part of the weights, with --calibrate-smooth smoothed) "
      "with per-channel and block FP8. "
      "Example:\n"
      "  nestedfp evaluate model.gguf --file wiki.test.raw --calibrate self --html report.html");
  verb->add_option("MODEL", flags->model.model,
                   "Hugging Face directory, nested checkpoint, .gguf file, or org/name in the local Hugging Face cache")
      ->required();
  verb->add_option("--threads", flags->model.threads, "threads to compute with; 0 = as many as this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  verb->add_option("--ctx", flags->model.ctx, "tokens of a chunk; 0 = 512")->check(CLI::Range(0, 1 << 30));
  add_calibration_flags(*verb, flags->model);
  verb->add_option("--file", flags->options.file, "the text")->required();
  verb->add_option("--chunks", flags->options.chunks, "chunks to score; 0 = all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  verb->add_option("--shares", flags->options.shares,
                   "shares of the weights in FP8 to measure, where an order is known")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  verb->add_option("--forms", flags->options.forms,
                   "measure only the forms whose names have one of these texts in them, beside FP16: \"per channel\", "
                   "\"75 % in FP8\"");
  verb->add_flag("--no-activations", flags->no_activations, "leave out the rows with E4M3 activations");
  verb->add_option("--scratch", flags->options.scratch,
                   "folder for FP16's distributions (2 bytes a token of the vocabulary and scored position); default: "
                   "$TMPDIR or /tmp");
  verb->add_option("--html", flags->html, "write a report with plots, one file, here");
  verb->add_option("--json-file", flags->json_file, "write all figures here");
  verb->add_flag("--json", flags->json, "print all figures as one JSON object");
  verb->callback([flags, verb, &status] {
    flags->shares_given = verb->count("--shares") > 0;
    status = run(*flags);
  });
}

}  // namespace nfp
