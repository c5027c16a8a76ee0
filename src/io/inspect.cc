#include "io/inspect.h"

#include <algorithm>
#include <utility>

#include "io/checkpoint_writer.h"
#include "io/json_object.h"

namespace nfp {
namespace {

// Of the relative error; plain rounding costs bell-shaped weights 2.6 %.
constexpr double kGoodError = 0.032;
constexpr double kFairError = 0.06;

std::string kind_name(SourceKind kind) {
  switch (kind) {
    case SourceKind::kHuggingFace:
      return "Hugging Face directory";
    case SourceKind::kNested:
      return "nested checkpoint";
    case SourceKind::kGguf:
      return "GGUF file";
  }
  return "";
}

int64_t integer(const nlohmann::ordered_json& config, const char* field) {
  const auto place = config.find(field);
  return place != config.end() && place->is_number_integer() ? place->get<int64_t>() : 0;
}

void read_config(const nlohmann::ordered_json& config, InspectReport& report) {
  if (config.contains("architectures") && config["architectures"].is_array() && !config["architectures"].empty() &&
      config["architectures"][0].is_string()) {
    report.architecture = config["architectures"][0].get<std::string>();
  }
  for (const char* field : {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
                            "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    if (integer(config, field) > 0) report.shape.emplace_back(field, integer(config, field));
  }
  const int64_t heads = integer(config, "num_attention_heads");
  const int64_t kv_heads = integer(config, "num_key_value_heads") > 0 ? integer(config, "num_key_value_heads") : heads;
  const int64_t head_dim = integer(config, "head_dim") > 0 ? integer(config, "head_dim")
                           : heads > 0                     ? integer(config, "hidden_size") / heads
                                                           : 0;
  const int64_t layers = integer(config, "num_hidden_layers");
  constexpr int64_t kMost = 1 << 20;  // keeps hostile numbers from overflowing the product
  if (layers > 0 && layers < kMost && kv_heads < kMost && head_dim < kMost) {
    report.kv_bytes_per_token = static_cast<uint64_t>(layers * kv_heads * head_dim) * 2 * 2;
  }
}

Result<MatrixReport> inspect_matrix(const ModelSource& source, const TensorInfo& tensor, LinearKind kind,
                                    ThreadPool& threads, InspectReport& report) {
  MatrixAnalysis found;
  NFP_ASSIGN_OR_RETURN(const auto reader, source.matrix(tensor.name, threads, &found));
  MatrixReport out;
  out.name = tensor.name;
  out.kind = kind;
  out.rows = tensor.shape[0];
  out.cols = tensor.shape[1];
  out.nests_by_paper = found.nests_by_paper;
  out.nested = reader->storage() == Storage::kNested;
  out.reason = found.reason;
  out.largest = found.largest;
  out.largest_row = found.largest_row;
  for (const int8_t e : found.exponents) {
    if (e != 0) ++out.exponents[e];
  }
  NFP_ASSIGN_OR_RETURN(out.fp8, check_fp8(*reader, threads));
  if (tensor.dtype == DType::kBF16) {
    report.bf16_weights += tensor.shape.elements();
    report.inexact_fp16 += found.inexact_fp16;
    report.inexact_nested += found.inexact();
    report.largest_error_fp16 = std::max(report.largest_error_fp16, found.largest_error_fp16);
    report.largest_error_nested =
        std::max(report.largest_error_nested, out.nested ? found.largest_error_nested : found.largest_error_fp16);
  }
  return out;
}

void count(const MatrixReport& matrix, Applicability& sum) {
  ++sum.matrices;
  sum.by_paper += matrix.nests_by_paper ? 1 : 0;
  sum.by_exponents += matrix.nested && !matrix.nests_by_paper ? 1 : 0;
  sum.dense += matrix.nested ? 0 : 1;
  sum.rows += matrix.rows;
  for (const auto& [e, rows] : matrix.exponents) sum.rows_shifted += rows;
}

void judge(InspectReport& report) {
  const MatrixReport* worst = nullptr;
  int64_t narrow = 0;
  for (const MatrixReport& matrix : report.matrices) {
    narrow += matrix.fp8.narrow_rows;
    if (matrix.nested && (worst == nullptr || matrix.fp8.nested_error > worst->fp8.nested_error)) worst = &matrix;
  }
  if (worst == nullptr) {
    report.verdict = Fp8Verdict::kPoor;
    report.verdict_text = "no linear layer can be nested: every step will run in FP16";
    return;
  }
  const double error = worst->fp8.nested_error;
  const bool many_dense = report.total.dense * 10 > report.total.matrices;
  if (error <= kGoodError && narrow == 0 && !many_dense) {
    report.verdict_text =
        fmt::format("FP8 suits this model: rounding costs at most {:.2f} % in any matrix", error * 100);
    return;
  }
  report.verdict = error <= kFairError ? Fp8Verdict::kFair : Fp8Verdict::kPoor;
  report.verdict_text = report.verdict == Fp8Verdict::kFair
                            ? "FP8 should do; check it with `nestedfp perplexity`"
                            : "FP8 may cost quality; check it with `nestedfp perplexity`";
  report.verdict_text += fmt::format(": rounding costs {:.2f} % in {}", error * 100, worst->name);
  if (narrow > 0) report.verdict_text += fmt::format(", {} rows are too small for E4M3's normal range", narrow);
  if (many_dense) {
    report.verdict_text += fmt::format(", {} of {} matrices stay dense", report.total.dense, report.total.matrices);
  }
}

}  // namespace

Result<InspectReport> inspect(const ModelSource& source, ThreadPool& threads, const ProgressCallback& progress) {
  InspectReport report;
  report.model = source.path();
  report.kind = kind_name(source.kind());
  NFP_ASSIGN_OR_RETURN(const auto config, parse_json_object(source.config_json(), source.path() + "/config.json"));
  read_config(config, report);
  report.tensors = static_cast<int64_t>(source.tensors().size());
  report.file_bytes = source.file_bytes();
  uint64_t linear_file_bytes = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    report.parameters += tensor.shape.elements();
    ++report.stored[tensor.stored];
    if (linear_kind(tensor.name)) linear_file_bytes += tensor.file_bytes;
  }
  ProgressCounter counter(progress, "reading", linear_file_bytes);
  uint64_t fp8_copy = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    const auto elements = static_cast<uint64_t>(tensor.shape.elements());
    const auto kind = linear_kind(tensor.name);
    if (!kind || tensor.shape.rank() != 2 || elements == 0) {
      // Embeddings are kept as FP16, vectors as FP32.
      report.weight_bytes += elements * (tensor.shape.rank() == 2 ? 2 : 4);
      continue;
    }
    NFP_ASSIGN_OR_RETURN(MatrixReport matrix, inspect_matrix(source, tensor, *kind, threads, report));
    count(matrix, report.by_kind[static_cast<size_t>(*kind)]);
    count(matrix, report.total);
    for (const auto& [e, rows] : matrix.exponents) report.exponents[e] += rows;
    report.weight_bytes += 2 * elements + (matrix.nested ? static_cast<uint64_t>(matrix.rows) : 0);
    report.linear_bytes += 2 * elements;
    report.fp8_step_bytes += matrix.nested ? elements : 2 * elements;
    fp8_copy += matrix.nested ? elements : 0;
    report.matrices.push_back(std::move(matrix));
    source.release(tensor);
    counter.add(tensor.file_bytes);
  }
  report.two_copies = report.weight_bytes + fp8_copy;
  judge(report);
  return report;
}

}  // namespace nfp
