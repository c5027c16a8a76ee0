// nestedfp perplexity: how well a model predicts a text, and how far it is from a saved base.
#include "eval/perplexity.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/log.h"
#include "base/process_memory.h"
#include "base/stop_signals.h"
#include "flags.h"
#include "json_output.h"
#include "report_file.h"
#include "status_line.h"
#include "verbs.h"

namespace nfp {
namespace {

struct PerplexityFlags {
  ModelFlags model;
  std::string file;
  PerplexityOptions options;
  bool json = false;
};

void print_json(const PerplexityFlags& flags, const PerplexityResult& r) {
  nlohmann::ordered_json out = {{"model", flags.model.model},
                                {"file", flags.file},
                                {"precision", flags.model.precision},
                                {"baseline", flags.model.baseline},
                                {"ctx", flags.options.ctx},
                                {"chunks", r.chunks},
                                {"scored_tokens", r.scored},
                                {"perplexity", r.perplexity},
                                {"error", r.error},
                                {"seconds", r.seconds},
                                {"tokens_per_s", static_cast<double>(r.chunks) * flags.options.ctx / r.seconds},
                                {"peak_memory_bytes", process_memory().peak}};
  if (r.kld) {
    out["kld"] = {{"mean", r.kld->mean},
                  {"error", r.kld->mean_error},
                  {"median", r.kld->median},
                  {"p99", r.kld->p99},
                  {"max", r.kld->largest},
                  {"same_top", r.kld->same_top},
                  {"same_top_error", r.kld->same_top_error},
                  {"base_perplexity", r.kld->base_perplexity}};
  }
  print_indented(out);
}

Status run(const PerplexityFlags& flags) {
  const StopRemovesTemporaries stop;
  NFP_RETURN_IF_ERROR(
      check_no_overlap({{"--save-base", flags.options.save_base}},
                       {{"--file", flags.file}, {"MODEL", flags.model.model}, {"--calibrate", flags.model.calibrate}}));
  NFP_RETURN_IF_ERROR(check_report(flags.options.save_base));
  NFP_ASSIGN_OR_RETURN(const std::string text, read_plain_text("--file", flags.file));
  const int32_t ctx = flags.model.ctx > 0 ? flags.model.ctx : flags.options.ctx;
  const std::string ctx_flag = flags.model.ctx_flag(flags.options.ctx);
  LoadedModelOptions wanted;
  flags.model.device.apply(wanted);
  wanted.needs_tokenizer = true;
  wanted.context = ctx;
  wanted.context_flag = ctx_flag;
  NFP_ASSIGN_OR_RETURN(const auto known, outline(flags.model.model, wanted));
  NFP_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, known->tokenizer->encode(text, {.parse_special = false}));
  PerplexityOptions options = flags.options;
  options.ctx = ctx;
  NFP_RETURN_IF_ERROR(check_perplexity(known->config.vocab, tokens, options));
  flags.model.warn_of_calibration_text(text);
  NFP_ASSIGN_OR_RETURN(const auto loaded, flags.model.load(false, ctx, ctx_flag));
  options.precision = flags.model.precision_value();
  options.kv_dtype = flags.model.kv_dtype_value();
  if (loaded->tokenizer->adds_bos()) options.bos = loaded->tokenizer->bos_id();
  const bool terminal = takes_escapes(STDERR_FILENO);
  const auto progress = [&](const PerplexityResult& r, int64_t all) {
    const double left = r.seconds / static_cast<double>(r.chunks) * static_cast<double>(all - r.chunks);
    if (terminal) {
      draw_status_line(fmt::format("chunk {}/{}: perplexity {:.4f} +- {:.4f}, {:.0f} s left", r.chunks, all,
                                   r.perplexity, r.error, left));
      if (r.chunks == all) log::say("\n");
    } else if (r.chunks % 50 == 0 || r.chunks == all) {
      log::say("chunk {}/{}: perplexity {:.4f} +- {:.4f}\n", r.chunks, all, r.perplexity, r.error);
    }
  };
  NFP_ASSIGN_OR_RETURN(const PerplexityResult r,
                       perplexity(*loaded->model, tokens, options, *loaded->threads, progress));
  PerplexityFlags shown = flags;
  shown.options = options;
  if (flags.json) {
    print_json(shown, r);
    return ok_status();
  }
  fmt::print("perplexity {:.4f} +- {:.4f} over {} chunks of {} tokens ({} scored), {}, {:.1f} s\n", r.perplexity,
             r.error, r.chunks, options.ctx, r.scored, flags.model.precision, r.seconds);
  if (r.kld) {
    fmt::print("KL divergence from the base: mean {:.6f} +- {:.6f}, median {:.6f}, 99 % {:.6f}, largest {:.4f}\n",
               r.kld->mean, r.kld->mean_error, r.kld->median, r.kld->p99, r.kld->largest);
    fmt::print("same top token {:.3f} +- {:.3f} %; the base's perplexity {:.4f}\n", r.kld->same_top * 100,
               r.kld->same_top_error * 100, r.kld->base_perplexity);
  }
  if (!options.save_base.empty()) fmt::print("distributions written to {}\n", options.save_base);
  return ok_status();
}

}  // namespace

void add_perplexity(CLI::App& app, Status& status) {
  auto flags = std::make_shared<PerplexityFlags>();
  CLI::App* verb = app.add_subcommand("perplexity", "Measure how well a model predicts a text");
  verb->footer(
      "The text is cut into chunks of --ctx tokens (512 unless given), of which the second half is scored, as "
      "llama.cpp's\n"
      "perplexity tool does. Examples:\n"
      "  nestedfp perplexity model.gguf --file wiki.test.raw --chunks 100 --save-base base.bin\n"
      "  nestedfp perplexity model.gguf --file wiki.test.raw --chunks 100 --precision fp8 --kld-base base.bin");
  flags->model.add_to(*verb);
  verb->get_option("--ctx")->description("tokens of a chunk; 0 = 512");
  verb->add_option("--file", flags->file, "the text")->required();
  verb->add_option("--chunks", flags->options.chunks, "chunks to score; 0 = all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  verb->add_option("--chunk-tokens", flags->options.max_feed, "tokens computed in one step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  auto* save = verb->add_option("--save-base", flags->options.save_base,
                                "write every scored distribution (2 bytes a token of the vocabulary)");
  verb->add_option("--kld-base", flags->options.kld_base, "compare with the distributions that --save-base wrote")
      ->excludes(save);
  verb->add_flag("--json", flags->json, "print one JSON object");
  verb->callback([flags, verb, &status] {
    if (is_exact(flags->model.precision_value())) warn_of_idle_fp8_flags(*verb, "--precision fp16");
    status = run(*flags);
  });
}

}  // namespace nfp
