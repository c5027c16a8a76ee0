#include "io/convert.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include "base/atomic_file.h"
#include "base/log.h"
#include "io/family.h"
#include "io/gguf_tokenizer.h"
#include "io/nested_checkpoint.h"
#include "io/opaque_tensor.h"
#include "io/safetensors_writer.h"
#include "io/staged_directory.h"

namespace nfp {
namespace {

// Small files that go along with the weights, where they are.
constexpr const char* kCompanions[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",   "vocab.json",
    "merges.txt",     "tokenizer.model",       "generation_config.json",  "chat_template.jinja", "chat_template.json",
    kTokenizerGguf};

Status copy_companions(const ModelSource& source, const std::string& directory) {
  for (const char* name : kCompanions) {
    NFP_ASSIGN_OR_RETURN(const auto text, source.text_file(name));
    if (text) NFP_RETURN_IF_ERROR(write_file(directory + "/" + name, *text));
  }
  if (const auto tokenizer = source.tokenizer_gguf()) {
    NFP_RETURN_IF_ERROR(write_file(directory + "/" + kTokenizerGguf, *tokenizer));
  }
  return ok_status();
}

// Index of the first element that is NaN or infinity; -1 when all are finite.
template <typename Bits>
int64_t first_not_finite(const std::byte* bytes, int64_t count, Bits exponent) {
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    if ((bits & exponent) == exponent) return i;
  }
  return -1;
}

// Rows of `tensor` in `dtype`, just read.
Status check_finite(const ModelSource& source, const TensorInfo& tensor, DType dtype, int64_t first, int64_t count,
                    const std::byte* bytes) {
  const int64_t elements = count * tensor.row_elements();
  int64_t bad = -1;
  if (dtype == DType::kF16) bad = first_not_finite<uint16_t>(bytes, elements, 0x7c00);
  if (dtype == DType::kBF16) bad = first_not_finite<uint16_t>(bytes, elements, 0x7f80);
  if (dtype == DType::kF32) bad = first_not_finite<uint32_t>(bytes, elements, 0x7f800000);
  if (bad < 0) return ok_status();
  return error(ErrorCode::kInvalidInput, "{}: tensor '{}' holds NaN or infinity in row {}; the checkpoint is damaged",
               source.path(), tensor.name, first + bad / tensor.row_elements());
}

// Counts written bytes and tells the caller.
class Meter {
 public:
  Meter(const ProgressCallback& callback, std::string_view what, uint64_t total)
      : callback_(callback), what_(what), total_(total) {}
  void add(uint64_t bytes) {
    done_ += bytes;
    if (callback_) callback_({what_, std::min(done_, total_), total_});
  }
  uint64_t done() const { return done_; }

 private:
  const ProgressCallback& callback_;
  std::string_view what_;
  uint64_t total_;
  uint64_t done_ = 0;
};

// Of what is written as it is.
DType copied_dtype(const TensorInfo& tensor) {
  const auto type = gemm_type(tensor.name);
  const bool narrowed =
      tensor.dtype == DType::kF32 && tensor.shape.rank() == 2 && type.has_value() && *type != GemmType::kHead;
  return narrowed ? DType::kF16 : tensor.dtype;
}

TensorSource copy_of(const ModelSource& source, const TensorInfo& tensor) {
  TensorSource copy;
  copy.name = tensor.name;
  copy.dtype = copied_dtype(tensor);
  copy.shape = tensor.shape;
  if (copy.dtype != tensor.dtype) {
    copy.read = [&source, &tensor](int64_t first, int64_t count, std::byte* out) -> Status {
      NFP_RETURN_IF_ERROR(source.read_fp16_rows(tensor.name, first, count, reinterpret_cast<uint16_t*>(out)));
      return check_finite(source, tensor, DType::kF16, first, count, out);
    };
  } else {
    copy.read = [&source, &tensor](int64_t first, int64_t count, std::byte* out) -> Status {
      NFP_RETURN_IF_ERROR(source.read_rows(tensor, first, count, out));
      return check_finite(source, tensor, tensor.dtype, first, count, out);
    };
  }
  copy.done = [&source, &tensor] { source.release(tensor); };
  return copy;
}

// All tensors but those of dtypes that are not written, of which a warning tells.
std::vector<const TensorInfo*> written_tensors(const ModelSource& source) {
  std::vector<const TensorInfo*> written, opaque;
  for (const TensorInfo& tensor : source.tensors()) (is_opaque(tensor) ? opaque : written).push_back(&tensor);
  if (!opaque.empty()) {
    log::warn("{}: leaves out {} tensor{} of dtypes that are not written: '{}' ({}){}", source.path(), opaque.size(),
              opaque.size() > 1 ? "s" : "", opaque.front()->name, opaque.front()->stored,
              opaque.size() > 1 ? ", ..." : "");
  }
  return written;
}

enum class Plane { kUpper, kLower };

TensorSource plane_of(const std::shared_ptr<MatrixReader>& matrix, const TensorInfo& tensor, Plane plane) {
  TensorSource out;
  out.name = tensor.name + (plane == Plane::kLower ? "_lower" : "");
  out.dtype = plane == Plane::kLower ? DType::kU8 : DType::kF8E4M3;
  out.shape = tensor.shape;
  out.read = [matrix, plane](int64_t first, int64_t count, std::byte* bytes) -> Status {
    std::vector<uint8_t> other(static_cast<size_t>(count * matrix->cols()));
    std::vector<int8_t> exponents(static_cast<size_t>(count));
    auto* wanted = reinterpret_cast<uint8_t*>(bytes);
    return plane == Plane::kUpper ? matrix->read_nested(first, count, wanted, other.data(), exponents.data())
                                  : matrix->read_nested(first, count, other.data(), wanted, exponents.data());
  };
  return out;
}

TensorSource scale_of(const MatrixAnalysis& analysis, const TensorInfo& tensor) {
  TensorSource out;
  out.name = tensor.name + "_scale";
  out.dtype = DType::kF32;
  out.shape = {tensor.shape[0], 1};
  out.read = [&exponents = analysis.exponents](int64_t first, int64_t count, std::byte* bytes) -> Status {
    for (int64_t r = 0; r < count; ++r) {
      const float scale = std::ldexp(1.0f, exponents[static_cast<size_t>(first + r)] - 8);
      std::memcpy(bytes + 4 * r, &scale, sizeof(scale));
    }
    return ok_status();
  };
  return out;
}

std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.size() - std::strlen(".weight")); }

// What the plain tensors take, and within a few bytes a row the nested ones.
uint64_t plain_bytes(const ModelSource& source) {
  uint64_t bytes = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    if (is_opaque(tensor)) continue;
    bytes += static_cast<uint64_t>(tensor.shape.elements()) * size_of(copied_dtype(tensor));
  }
  return bytes;
}

Status refuse_quantised(const ModelSource& source) {
  for (const TensorInfo& tensor : source.tensors()) {
    if (gemm_type(tensor.name) && size_of(tensor.dtype) == 1) {
      return error(ErrorCode::kUnsupported,
                   "{}: tensor '{}' is {}, quantised already; convert the FP16 or BF16 original", source.path(),
                   tensor.name, tensor.stored);
    }
  }
  if (!source.stored_fp8()) return ok_status();
  return error(
      ErrorCode::kUnsupported,
      "{}: its weights are FP8 already ({}), and have no original to restore; it runs as it is, or convert the "
      "FP16 or BF16 original",
      source.path(), source.stored_fp8()->text);
}

// A linear layer's matrix on its way into the checkpoint.
struct Candidate {
  std::shared_ptr<MatrixReader> matrix;
  MatrixAnalysis analysis;
  std::string group;
};

// Engines multiply q, k and v of a layer as one matrix, and gate and up likewise, and take such a matrix in one storage
// only; all experts of a layer are one such matrix, gate, up and down. "model.layers.3 q/k/v".
std::string group_of(const std::string& tensor, GemmType type) {
  constexpr std::string_view kLayers = "layers.";
  const size_t layers = tensor.find(kLayers);
  const size_t number_end = layers == std::string::npos ? layers : tensor.find('.', layers + kLayers.size());
  const std::string_view layer = std::string_view(tensor).substr(0, number_end);
  switch (block_of(tensor)) {
    case Block::kExpert:
      return fmt::format("{} experts", layer);
    case Block::kShared:
      return fmt::format("{} shared {}", layer, name_of(type));
    case Block::kDense:
      break;
  }
  return fmt::format("{} {}", layer, name_of(type));
}

// Every linear layer but the head, by tensor. All are read once here, since one that does not nest decides for its
// group; `dense_groups` maps such a group to the first matrix of it that does not.
Result<std::map<std::string, Candidate>> find_candidates(const ModelSource& source, const ConvertOptions& options,
                                                         ThreadPool& threads,
                                                         std::map<std::string, std::string>& dense_groups) {
  std::map<std::string, Candidate> found;
  const auto is_candidate = [](const TensorInfo& tensor) {
    const auto type = gemm_type(tensor.name);
    return type && *type != GemmType::kHead;
  };
  uint64_t total = 0;
  for (const TensorInfo& tensor : source.tensors()) total += is_candidate(tensor) ? tensor.bytes() : 0;
  Meter meter(options.progress, "reading", total);
  for (const TensorInfo& tensor : source.tensors()) {
    const auto type = gemm_type(tensor.name);
    if (!is_candidate(tensor)) continue;
    Candidate candidate;
    candidate.group = group_of(tensor.name, *type);
    NFP_ASSIGN_OR_RETURN(candidate.matrix, source.matrix(tensor.name, threads, &candidate.analysis));
    if (candidate.matrix->storage() == Storage::kNested && options.matrix) {
      NFP_ASSIGN_OR_RETURN(candidate.matrix, options.matrix(tensor.name));
    }
    if (candidate.matrix->storage() != Storage::kNested) {
      dense_groups.try_emplace(candidate.group, tensor.name);
      candidate.matrix = nullptr;
    }
    found.emplace(tensor.name, std::move(candidate));
    meter.add(tensor.bytes());
  }
  return found;
}

Result<ConvertReport> convert_into(StagedDirectory& staged, const ModelSource& source, const ConvertOptions& options,
                                   ThreadPool& threads) {
  ConvertReport report;
  NestedInfo info;
  info.uppers = options.uppers;
  info.calibration = options.calibration;
  bool first_matrix = true;
  std::vector<TensorSource> main, lower;
  std::map<std::string, std::string> dense_groups;
  NFP_ASSIGN_OR_RETURN(const auto candidates, find_candidates(source, options, threads, dense_groups));
  for (const TensorInfo* each : written_tensors(source)) {
    const TensorInfo& tensor = *each;
    // lm_head stays as it is on disk: other engines read it so. It is nested when it is loaded.
    const auto place = candidates.find(tensor.name);
    const auto dense_group = place == candidates.end() ? dense_groups.end() : dense_groups.find(place->second.group);
    if (place == candidates.end() || dense_group != dense_groups.end()) {
      if (gemm_type(tensor.name)) report.dense.push_back(tensor.name);
      // Dense BF16 is copied; FP32 is rounded all the same.
      const bool rounded = place != candidates.end() && tensor.dtype == DType::kF32;
      if (rounded && place->second.analysis.inexact_fp16 > 0) info.inexact.insert(tensor.name);
      if (place != candidates.end() && place->second.matrix) report.dense_with[tensor.name] = dense_group->second;
      main.push_back(copy_of(source, tensor));
      continue;
    }
    const auto& [matrix, analysis, group] = place->second;
    const DType dtype = tensor.dtype == DType::kBF16 ? DType::kBF16 : DType::kF16;
    if (std::exchange(first_matrix, false)) info.source_dtype = dtype;
    if (dtype != info.source_dtype) info.dtypes[tensor.name] = dtype;
    if (analysis.inexact_nested > 0) info.inexact.insert(tensor.name);
    main.push_back(plane_of(matrix, tensor, Plane::kUpper));
    main.push_back(scale_of(analysis, tensor));
    lower.push_back(plane_of(matrix, tensor, Plane::kLower));
    ++report.nested;
  }
  if (report.nested == 0) {
    return error(ErrorCode::kUnsupported, "{}: no linear layer can be nested (inspect says why)", source.path());
  }

  uint64_t total = 0;
  for (const auto* list : {&main, &lower}) {
    for (const TensorSource& tensor : *list) total += tensor.bytes();
  }
  Meter meter(options.progress, "converting", total);
  ShardOptions shards;
  shards.shard_bytes = options.shard_bytes;
  shards.written = [&](uint64_t bytes) { meter.add(bytes); };
  NFP_RETURN_IF_ERROR(write_safetensors(staged.path(), main, shards, threads));
  const std::string lower_path = staged.path() + "/" + info.lower_directory;
  std::error_code code;
  if (!std::filesystem::create_directory(lower_path, code)) {
    return error(ErrorCode::kIo, "{}: cannot be created: {}", lower_path, code.message());
  }
  shards.prefix = "lower";
  NFP_RETURN_IF_ERROR(write_safetensors(lower_path, lower, shards, threads));

  std::vector<std::string> ignore;
  for (const std::string& name : report.dense) ignore.push_back(module_of(name));
  for (const TensorInfo& tensor : source.tensors()) {
    // Linear layers to other engines.
    if (is_router(tensor.name)) ignore.push_back(module_of(tensor.name));
  }
  if (source.has("lm_head.weight") == false)
    ignore.push_back("lm_head");  // tied: other engines ask for it by this name
  NFP_ASSIGN_OR_RETURN(const std::string config, nested_config(source.config_json(), info, ignore));
  NFP_RETURN_IF_ERROR(write_file(staged.path() + "/config.json", config));
  NFP_RETURN_IF_ERROR(copy_companions(source, staged.path()));
  NFP_RETURN_IF_ERROR(staged.commit());
  report.bytes = meter.done();
  return report;
}

Result<RestoreReport> restore_into(StagedDirectory& staged, const ModelSource& source, const ConvertOptions& options,
                                   ThreadPool& threads) {
  NFP_ASSIGN_OR_RETURN(const NestedInfo info, parse_nested_info(source.config_json(), source.path() + "/config.json"));
  RestoreReport report;
  report.inexact.assign(info.inexact.begin(), info.inexact.end());
  std::vector<TensorSource> tensors;
  uint64_t total = 0;
  for (const TensorInfo* tensor : written_tensors(source)) {
    tensors.push_back(copy_of(source, *tensor));
    total += tensors.back().bytes();
  }
  Meter meter(options.progress, "restoring", total);
  ShardOptions shards;
  shards.shard_bytes = options.shard_bytes;
  shards.single_name = true;
  shards.written = [&](uint64_t bytes) { meter.add(bytes); };
  NFP_RETURN_IF_ERROR(write_safetensors(staged.path(), tensors, shards, threads));
  NFP_ASSIGN_OR_RETURN(const std::string config, plain_config(source.config_json()));
  NFP_RETURN_IF_ERROR(write_file(staged.path() + "/config.json", config));
  NFP_RETURN_IF_ERROR(copy_companions(source, staged.path()));
  NFP_RETURN_IF_ERROR(staged.commit());
  report.tensors = static_cast<int64_t>(tensors.size());
  report.bytes = meter.done();
  return report;
}

Result<StagedDirectory> stage_convert(const ModelSource& source, const std::string& destination,
                                      const ConvertOptions& options) {
  if (source.kind() == SourceKind::kNested) {
    return error(ErrorCode::kUnsupported, "{}: is a nested checkpoint already", source.path());
  }
  NFP_RETURN_IF_ERROR(refuse_quantised(source));
  return StagedDirectory::create(destination, options.force, source.path(), plain_bytes(source));
}

}  // namespace

Status check_convert(const ModelSource& source, const std::string& destination, const ConvertOptions& options) {
  NFP_RETURN_IF_ERROR(stage_convert(source, destination, options));
  return ok_status();
}

Result<ConvertReport> convert(const ModelSource& source, const std::string& destination, const ConvertOptions& options,
                              ThreadPool& threads) {
  NFP_ASSIGN_OR_RETURN(StagedDirectory staged, stage_convert(source, destination, options));
  auto report = convert_into(staged, source, options, threads);
  if (!report.ok()) return staged.at_place(std::move(report).error());
  return report;
}

Result<RestoreReport> restore(const ModelSource& source, const std::string& destination, const ConvertOptions& options,
                              ThreadPool& threads) {
  if (source.kind() != SourceKind::kNested) {
    return error(ErrorCode::kUnsupported, "{}: is not a nested checkpoint; there is nothing to restore", source.path());
  }
  NFP_ASSIGN_OR_RETURN(StagedDirectory staged,
                       StagedDirectory::create(destination, options.force, source.path(), plain_bytes(source)));
  auto report = restore_into(staged, source, options, threads);
  if (!report.ok()) return staged.at_place(std::move(report).error());
  return report;
}

}  // namespace nfp
