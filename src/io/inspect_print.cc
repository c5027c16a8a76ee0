// The report of inspect as text and as JSON.
#include <algorithm>
#include <string>

#include "io/inspect.h"
#include "io/json_object.h"

namespace nfp {
namespace {

constexpr std::array<std::string_view, 3> kVerdictNames = {"good", "fair", "poor"};
constexpr size_t kListed = 20;  // exceptions named in the text; the JSON has all

std::string size(uint64_t bytes) {
  return bytes >= 10'000'000'000 ? fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9)
                                 : fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

std::string rows_by_exponent(const std::map<int, int64_t>& exponents) {
  std::string out;
  for (const auto& [e, rows] : exponents) out += fmt::format("{}e={}: {} rows", out.empty() ? "" : ", ", e, rows);
  return out;
}

void print_table(const InspectReport& r, std::string& out) {
  out += "\nNested FP, by kind of linear layer (matrices)\n";
  out += fmt::format("  {:<9} {:>8} {:>13} {:>16} {:>6} {:>22}\n", "", "matrices", "paper's rule", "+ row exponents",
                     "dense", "rows with an exponent");
  const auto line = [&](std::string_view name, const Applicability& a) {
    if (a.matrices == 0) return;
    out += fmt::format("  {:<9} {:>8} {:>13} {:>16} {:>6} {:>22}\n", name, a.matrices, a.by_paper,
                       fmt::format("+{}", a.by_exponents), a.dense, fmt::format("{} of {}", a.rows_shifted, a.rows));
  };
  for (size_t i = 0; i < r.by_kind.size(); ++i) line(kLinearKindNames[i], r.by_kind[i]);
  line("all", r.total);
  const int64_t exceptions = r.total.matrices - r.total.by_paper;
  out += fmt::format(
      "  By the paper's rule (every |w| <= 1.75) {} of {} matrices would be exceptions; row exponents nest {}",
      exceptions, r.total.matrices, r.total.matrices - r.total.dense);
  out += r.exponents.empty() ? "\n" : fmt::format("\n  ({})\n", rows_by_exponent(r.exponents));
}

void print_exceptions(const InspectReport& r, std::string& out) {
  std::vector<const MatrixReport*> exceptions;
  for (const MatrixReport& m : r.matrices) {
    if (!m.nests_by_paper || !m.nested) exceptions.push_back(&m);
  }
  if (exceptions.empty()) return;
  // The dense ones first, then by their largest weight.
  std::stable_sort(exceptions.begin(), exceptions.end(), [](const MatrixReport* a, const MatrixReport* b) {
    return a->nested != b->nested ? !a->nested : a->largest > b->largest;
  });
  out += "\nExceptions to the paper's rule, by largest |w|\n";
  for (size_t i = 0; i < exceptions.size() && i < kListed; ++i) {
    const MatrixReport& m = *exceptions[i];
    out += fmt::format("  {:<46} {:>8.4g} in row {:<6} {}\n", m.name, m.largest, m.largest_row,
                       m.nested ? "nested; " + rows_by_exponent(m.exponents) : "dense; " + m.reason);
  }
  if (exceptions.size() > kListed) {
    out += fmt::format("  and {} more (--json lists all)\n", exceptions.size() - kListed);
  }
}

void print_fp8(const InspectReport& r, std::string& out) {
  out += "\nFP8 compatibility (worst matrix of each kind)\n";
  out += fmt::format("  {:<9} {:>13} {:>13} {:>11} {:>12} {:>17}\n", "", "max/rms", "range (bits)", "narrow rows",
                     "error nested", "error per channel");
  for (size_t kind = 0; kind < r.by_kind.size(); ++kind) {
    if (r.by_kind[kind].matrices == 0) continue;
    Fp8Check worst;
    for (const MatrixReport& m : r.matrices) {
      if (static_cast<size_t>(m.kind) != kind) continue;
      worst.outlier_ratio = std::max(worst.outlier_ratio, m.fp8.outlier_ratio);
      worst.dynamic_range = std::max(worst.dynamic_range, m.fp8.dynamic_range);
      worst.narrow_rows += m.fp8.narrow_rows;
      worst.nested_error = std::max(worst.nested_error, m.fp8.nested_error);
      worst.channel_error = std::max(worst.channel_error, m.fp8.channel_error);
    }
    out += fmt::format("  {:<9} {:>13.1f} {:>13.1f} {:>11} {:>10.2f} % {:>15.2f} %\n", kLinearKindNames[kind],
                       worst.outlier_ratio, worst.dynamic_range, worst.narrow_rows, worst.nested_error * 100,
                       worst.channel_error * 100);
  }
  out += fmt::format("  Verdict: {}. {}.\n", kVerdictNames[static_cast<size_t>(r.verdict)], r.verdict_text);
}

nlohmann::ordered_json to_json(const Applicability& a) {
  return {{"matrices", a.matrices},
          {"by_paper", a.by_paper},
          {"by_row_exponents", a.by_exponents},
          {"nested", a.matrices - a.dense},
          {"dense", a.dense},
          {"rows", a.rows},
          {"rows_with_exponent", a.rows_shifted}};
}

nlohmann::ordered_json to_json(const std::map<int, int64_t>& exponents) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const auto& [e, rows] : exponents) out[std::to_string(e)] = rows;
  return out;
}

nlohmann::ordered_json to_json(const MatrixReport& m) {
  nlohmann::ordered_json out = {{"name", m.name},
                                {"kind", name_of(m.kind)},
                                {"shape", {m.rows, m.cols}},
                                {"nests_by_paper", m.nests_by_paper},
                                {"storage", m.nested ? "nested" : "dense"},
                                {"largest", m.largest},
                                {"largest_row", m.largest_row},
                                {"row_exponents", to_json(m.exponents)}};
  if (!m.reason.empty()) out["reason"] = m.reason;
  out["fp8"] = {{"outlier_ratio", m.fp8.outlier_ratio},
                {"dynamic_range_bits", m.fp8.dynamic_range},
                {"narrow_rows", m.fp8.narrow_rows},
                {"nested_error", m.fp8.nested_error},
                {"per_channel_error", m.fp8.channel_error}};
  return out;
}

}  // namespace

std::string inspect_text(const InspectReport& r) {
  std::string out = fmt::format("{} ({})\n", r.model, r.kind);
  out += fmt::format("{}: {:.1f} M parameters in {} tensors", r.architecture.empty() ? "model" : r.architecture,
                     static_cast<double>(r.parameters) / 1e6, r.tensors);
  for (const auto& [dtype, tensors] : r.stored) out += fmt::format(", {} {}", tensors, dtype);
  out += "\n";
  for (const auto& [field, value] : r.shape) out += fmt::format("  {:<24} {}\n", field, value);
  out += "\nMemory\n";
  out += fmt::format("  {:<32} {}\n", "files", size(r.file_bytes));
  out += fmt::format("  {:<32} {} (an FP16 and an FP8 copy: {})\n", "weights, both precisions", size(r.weight_bytes),
                     size(r.two_copies));
  out += fmt::format("  {:<32} FP16 {}, FP8 {}\n", "linear weights read in a step", size(r.linear_bytes),
                     size(r.fp8_step_bytes));
  if (r.kv_bytes_per_token > 0) {
    out += fmt::format("  {:<32} {} bytes a token\n", "KV cache, FP16", r.kv_bytes_per_token);
  }
  print_table(r, out);
  print_exceptions(r, out);
  if (r.bf16_weights > 0) {
    out += fmt::format(
        "\nBF16 exactness\n  of {} weights in linear layers, {} change in plain FP16 (by up to {:.3g}), {} when nested "
        "(by "
        "up to {:.3g})\n",
        r.bf16_weights, r.inexact_fp16, r.largest_error_fp16, r.inexact_nested, r.largest_error_nested);
  }
  print_fp8(r, out);
  return out;
}

std::string inspect_json(const InspectReport& r) {
  nlohmann::ordered_json out = {{"model", r.model}, {"kind", r.kind}, {"architecture", r.architecture}};
  for (const auto& [field, value] : r.shape) out[field] = value;
  out["tensors"] = r.tensors;
  out["parameters"] = r.parameters;
  out["stored"] = r.stored;
  out["memory"] = {{"file_bytes", r.file_bytes},         {"weight_bytes", r.weight_bytes},
                   {"two_copies_bytes", r.two_copies},   {"fp16_step_bytes", r.linear_bytes},
                   {"fp8_step_bytes", r.fp8_step_bytes}, {"kv_bytes_per_token", r.kv_bytes_per_token}};
  nlohmann::ordered_json table = nlohmann::ordered_json::object();
  for (size_t i = 0; i < r.by_kind.size(); ++i) {
    if (r.by_kind[i].matrices > 0) table[std::string(kLinearKindNames[i])] = to_json(r.by_kind[i]);
  }
  table["all"] = to_json(r.total);
  out["applicability"] = std::move(table);
  out["paper_exceptions"] = r.total.matrices - r.total.by_paper;
  out["row_exponents"] = to_json(r.exponents);
  out["bf16"] = {{"weights", r.bf16_weights},
                 {"inexact_fp16", r.inexact_fp16},
                 {"inexact_nested", r.inexact_nested},
                 {"largest_error_fp16", r.largest_error_fp16},
                 {"largest_error_nested", r.largest_error_nested}};
  out["fp8_verdict"] = {{"verdict", kVerdictNames[static_cast<size_t>(r.verdict)]}, {"text", r.verdict_text}};
  out["matrices"] = nlohmann::ordered_json::array();
  for (const MatrixReport& m : r.matrices) out["matrices"].push_back(to_json(m));
  return to_text(out);
}

}  // namespace nfp
