// nestedfp inspect: what a model's weights are like.
#include "io/inspect.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <memory>
#include <unordered_set>

#include "base/byte_size.h"
#include "base/cpu_topology.h"
#include "calibrate/calibrate.h"
#include "flags.h"
#include "inspect_json.h"
#include "io/split_source.h"
#include "json_output.h"
#include "model/config.h"
#include "model/dummy_model.h"
#include "model/plan.h"
#include "model/weight_loader.h"
#include "progress_bar.h"
#include "verbs.h"

namespace nfp {
namespace {

struct InspectFlags {
  std::string model;
  bool json = false;
  bool all = false;
};

std::string_view verdict_name(Fp8Verdict verdict) {
  constexpr std::string_view kNames[] = {"good", "usable", "poor"};
  return kNames[static_cast<size_t>(verdict)];
}

std::string exponents_text(const std::map<int, int64_t>& exponents) {
  std::string text;
  for (const auto& [e, rows] : exponents) text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", e, rows);
  return text;
}

nlohmann::ordered_json summary_json(std::string_view name, const KindSummary& s) {
  return {{"type", name},
          {"matrices", s.matrices},
          {"nested_by_paper_rule", s.by_paper},
          {"nested_by_row_exponents", s.by_exponents},
          {"dense", s.dense},
          {"exceptions_by_paper_rule", s.matrices - s.by_paper}};
}

nlohmann::ordered_json rounding_json(const SourceRounding& rounding) {
  return {
      {"source", rounding.present}, {"inexact_weights", rounding.inexact}, {"largest_error", rounding.largest_error}};
}

nlohmann::ordered_json calibration_json(const ModelSource& source) {
  const auto c = stored_calibration(source);
  if (!c) return nullptr;
  return {{"rule", c->rule},
          {"compensated", c->compensated},
          {"smoothed", c->smoothed},
          {"text", c->text},
          {"tokens", c->tokens}};
}

void print_json(const ModelConfig& config, const ModelSource& source, const InspectReport& r,
                const SamplingDefaults& sampling, const Status& complete) {
  nlohmann::ordered_json kinds = nlohmann::ordered_json::array();
  for (size_t k = 0; k < kGemmTypes; ++k) kinds.push_back(summary_json(kGemmTypeNames[k], r.kinds[k]));
  nlohmann::ordered_json exponents = nlohmann::ordered_json::object();
  for (const auto& [e, rows] : r.exponents) exponents[std::to_string(e)] = rows;
  nlohmann::ordered_json matrices = nlohmann::ordered_json::array();
  for (const MatrixReport& m : r.matrices) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::object();
    for (const auto& [e, count] : m.exponents) rows[std::to_string(e)] = count;
    matrices.push_back({{"name", m.name},
                        {"part_of", m.part_of.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(m.part_of)},
                        {"type", name_of(m.type)},
                        {"dtype", name_of(m.dtype)},
                        {"shape", {m.rows, m.cols}},
                        {"nested", m.nests},
                        {"nested_by_paper_rule", m.nests_by_paper},
                        {"largest", m.largest},
                        {"rows_by_exponent", rows},
                        {"reason", m.reason},
                        {"inexact_weights", m.inexact()},
                        {"largest_error", m.largest_error},
                        {"fp8",
                         {{"relative_error", m.fp8.relative_error},
                          {"outlier_ratio", m.fp8.outlier_ratio},
                          {"dynamic_range_bits", m.fp8.dynamic_range},
                          {"subnormal_share", m.fp8.subnormal_share},
                          {"narrow_rows", m.fp8.narrow_rows}}}});
  }
  nlohmann::ordered_json out = shape_json(source.path(), config);
  out.update(
      {{"parameters", r.parameters},
       {"linear_parameters", r.linear_parameters},
       {"file_bytes", r.file_bytes},
       {"fp16_bytes", r.fp16_bytes},
       {"kv_bytes_per_token_f16", kv_bytes_per_token(config, DType::kF16)},
       {"kv_bytes_per_token_fp8", kv_bytes_per_token(config, DType::kF8E4M3)},
       {"stored_fp8", source.stored_fp8() ? nlohmann::ordered_json(source.stored_fp8()->text) : nullptr},
       {"calibration", calibration_json(source)},
       {"sampling", nlohmann::ordered_json::parse(sampling.json())},
       {"linear", summary_json("all", r.total)},
       {"by_type", kinds},
       {"rows", r.rows},
       {"rows_with_exponent", r.shifted_rows},
       {"rows_by_exponent", exponents},
       {"bf16", rounding_json(r.bf16)},
       {"fp32", rounding_json(r.f32)},
       {"fp8",
        {{"verdict", verdict_name(r.verdict)}, {"explanation", r.verdict_text}, {"relative_error", r.relative_error}}},
       {"incomplete", complete.ok() ? nullptr : nlohmann::ordered_json(complete.error().message)},
       {"left_out", r.left_out},
       {"matrices", matrices}});
  print_indented(out);
}

void print_text(const InspectFlags& flags, const ModelConfig& config, const ModelSource& source, const InspectReport& r,
                const SamplingDefaults& sampling) {
  fmt::print("{}\n{}: {} layers, hidden {}, {} heads ({} KV) of {}, vocabulary {}, context {}\n", source.path(),
             config.architecture, config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim,
             config.vocab, config.max_context);
  fmt::print(
      "{:.1f} M parameters ({:.1f} M in linear layers*); {} in its files, {} in memory in both precisions;\n"
      "KV cache {} a token in FP16, {} in FP8\n{}\n\n",
      static_cast<double>(r.parameters) / 1e6, static_cast<double>(r.linear_parameters) / 1e6,
      human_bytes(r.file_bytes), human_bytes(r.fp16_bytes), human_bytes(kv_bytes_per_token(config, DType::kF16)),
      human_bytes(kv_bytes_per_token(config, DType::kF8E4M3)), fp8_steps_text());
  if (!r.left_out.empty()) {
    fmt::print("left out: {} tensors of its files that config.json does not imply ({}{})\n\n", r.left_out.size(),
               r.left_out.front(), r.left_out.size() > 1 ? ", ..." : "");
  }
  if (source.stored_fp8()) {
    fmt::print("FP8 already, {}: no original to restore\n\n", source.stored_fp8()->text);
  }
  if (!sampling.empty()) fmt::print("sampling, as its authors have it: {}\n\n", sampling.text());
  fmt::print("{:<9} {:>8} {:>16} {:>18} {:>6}\n", "linear", "matrices", "nest by |w|<=1.75", "by row exponents",
             "dense");
  const auto line = [](std::string_view name, const KindSummary& s) {
    if (s.matrices > 0)
      fmt::print("{:<9} {:>8} {:>16} {:>18} {:>6}\n", name, s.matrices, s.by_paper, s.by_exponents, s.dense);
  };
  for (size_t k = 0; k < kGemmTypes; ++k) line(kGemmTypeNames[k], r.kinds[k]);
  line("all*", r.total);
  fmt::print("(* without lm_head)\n{} of {} rows carry an exponent", r.shifted_rows, r.rows);
  if (r.shifted_rows > 0) fmt::print(" ({})", exponents_text(r.exponents));
  fmt::print("\n");

  std::vector<const MatrixReport*> exceptions;
  for (const MatrixReport& m : r.matrices) {
    if (!m.nests_by_paper) exceptions.push_back(&m);
  }
  if (!exceptions.empty()) fmt::print("\nexceptions by the paper's rule: {}\n", exceptions.size());
  constexpr size_t kShown = 12;
  size_t shown = 0;
  for (const MatrixReport* exception : exceptions) {
    const MatrixReport& m = *exception;
    if (!flags.all && m.nests && shown >= kShown) continue;  // every dense one is told
    ++shown;
    const std::string place = m.part_of.empty() ? "" : " (of " + m.part_of + ")";
    fmt::print("  {}{}: largest |w| {:.4f}; {}\n", m.name, place, m.largest,
               m.nests ? "nested, rows by exponent " + exponents_text(m.exponents) : "dense: " + m.reason);
  }
  if (shown < exceptions.size()) fmt::print("  ... (--all lists every one)\n");
  const auto rounding = [](std::string_view dtype, const SourceRounding& of) {
    if (of.present)
      fmt::print("\n{} source: {} weights are not exact in FP16, largest error {:.3g}\n", dtype, of.inexact,
                 of.largest_error);
  };
  rounding("BF16", r.bf16);
  rounding("FP32", r.f32);
  fmt::print("\nFP8: {}. {}\n", verdict_name(r.verdict), r.verdict_text);
  double outlier = 0, range = 0;
  int64_t narrow = 0;
  for (const MatrixReport& m : r.matrices) {
    outlier = std::max(outlier, m.fp8.outlier_ratio);
    range = std::max(range, m.fp8.dynamic_range);
    narrow += m.fp8.narrow_rows;
  }
  fmt::print(
      "     largest outlier ratio {:.0f} (max |w| / rms), widest dynamic range {:.1f} bits, {} very narrow rows\n",
      outlier, range, narrow);
  if (const auto c = stored_calibration(source)) {
    fmt::print(
        "     calibrated on {} tokens of {} (rule {}{}{}): codes are chosen for the layers' outputs,\n"
        "     so their own error is larger than that of the nearest codes\n",
        c->tokens, c->text == "self" ? "the model's own text" : "a text file", c->rule,
        c->compensated ? ", compensated" : "", c->smoothed ? ", smoothed" : "");
  }
}

Status run(const InspectFlags& flags) {
  if (flags.model.ends_with(".json")) return inspect_plan(flags.model, flags.json);
  NFP_ASSIGN_OR_RETURN(auto opened, ModelSource::open(flags.model));
  const std::shared_ptr<const ModelSource> source = std::move(opened);
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source->config_json(), source->path() + ": config.json"));
  NFP_ASSIGN_OR_RETURN(const SamplingDefaults sampling, load_sampling_defaults(*source, "auto"));
  Status complete = check_complete(*source, config);
  std::unordered_set<std::string> implied;
  for (const DummyTensor& tensor : tensors_of(config)) implied.insert(tensor.name);
  ThreadPool threads(usable_cpu_count());
  InspectReport report;
  {
    NFP_ASSIGN_OR_RETURN(const auto split, split_fused(source));
    ProgressBar bar;
    NFP_ASSIGN_OR_RETURN(report, inspect(*split, threads, bar.callback(),
                                         [&](const std::string& name) { return implied.contains(name); }));
  }
  if (flags.json) {
    print_json(config, *source, report, sampling, complete);
  } else {
    print_text(flags, config, *source, report, sampling);
  }
  return complete;  // what there is has been shown
}

}  // namespace

void add_inspect(CLI::App& app, Status& status) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* verb = app.add_subcommand("inspect", "Show what a model is and how its weights nest");
  verb->footer(
      "Counts are of the tensors that config.json implies; linear layers (in JSON linear_parameters) are without "
      "lm_head.\n"
      "Examples:\n  nestedfp inspect model.gguf\n  nestedfp inspect config.json    # what it takes, without weights\n  "
      "nestedfp inspect ./Llama-3.2-1B --json");
  verb->add_option("MODEL", flags->model,
                   "Hugging Face directory, nested checkpoint, .gguf file, or org/name; or a config.json alone")
      ->required();
  verb->add_flag("--all", flags->all, "list every exception");
  verb->add_flag("--json", flags->json, "print one JSON object with every matrix");
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
