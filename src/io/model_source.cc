#include "io/model_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "base/float_types.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "io/gguf_parts.h"
#include "io/gguf_tokenizer.h"
#include "io/hub_cache.h"
#include "io/model_json.h"
#include "io/opaque_tensor.h"
#include "io/sources.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

WeightType weight_type(DType dtype) { return dtype == DType::kBF16 ? WeightType::kBF16 : WeightType::kF16; }

// What FP16 changes of an FP32 matrix.
struct Narrowed {
  std::mutex mutex;
  int64_t changed = 0;
  float largest_error = 0;
};

Status narrow_rows(const ModelSource& source, const TensorInfo& tensor, int64_t first, int64_t count, uint16_t* out,
                   Narrowed& narrowed) {
  const int64_t cols = tensor.row_elements();
  std::vector<float> values(static_cast<size_t>(count * cols));
  NFP_RETURN_IF_ERROR(source.read_rows(tensor, first, count, reinterpret_cast<std::byte*>(values.data())));
  int64_t changed = 0;
  float largest_error = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    out[i] = fp32_to_fp16(values[i]);
    const float kept = fp16_to_fp32(out[i]);
    if (kept == values[i] || !std::isfinite(values[i])) continue;  // NaN and infinity are told of by the analysis
    if (std::isinf(kept)) {
      const auto at = static_cast<int64_t>(i);
      return error(ErrorCode::kUnsupported,
                   "{}: tensor '{}': weight at row {}, column {} is {}, beyond FP16, in which FP32 weights are held; "
                   "store the model in BF16",
                   source.path(), tensor.name, first + at / cols, at % cols, values[i]);
    }
    ++changed;
    largest_error = std::max(largest_error, std::abs(kept - values[i]));
  }
  const std::lock_guard lock(narrowed.mutex);
  narrowed.changed += changed;
  narrowed.largest_error = std::max(narrowed.largest_error, largest_error);
  return ok_status();
}

// A directory without weights of its own may hold a GGUF file, as GGUF repositories do, some beside a config.json.
Result<std::string> gguf_inside(const std::string& path) {
  std::vector<std::string> found;
  std::string projector;
  std::error_code code;
  fs::directory_iterator place(path, code), end;
  for (; !code && place != end; place.increment(code)) {
    const std::string name = place->path().filename().string();
    if (names_gguf_model(name)) found.push_back(place->path().string());
    if (names_gguf_projector(name)) projector = name;
  }
  if (found.size() > 1) {
    return error(ErrorCode::kUsage, "{}: holds {} GGUF files; name one of them (for org/name: org/name:FILE)", path,
                 found.size());
  }
  if (found.empty()) return std::string();
  if (!projector.empty()) log::warn("{}: {} is not used: the model is read as a text model", path, projector);
  return found[0];
}

// The error where there is no config.json, or what lies in its place.
Error other_form(const std::string& path, Error missing) {
  std::error_code code;
  if (missing.code != ErrorCode::kNotFound) return missing;
  if (fs::exists(path + "/adapter_config.json", code)) {
    return error(
        ErrorCode::kUnsupported,
        "{}: is an adapter of another model (adapter_config.json); merge the two with PEFT's merge_and_unload() "
        "and save the whole model",
        path);
  }
  if (fs::exists(path + "/params.json", code)) {
    return error(ErrorCode::kUnsupported,
                 "{}: has params.json and no config.json; take the model in the form that transformers reads", path);
  }
  return missing;
}

Result<std::unique_ptr<ModelSource>> open_directory(const std::string& path) {
  std::error_code code;
  const auto has = [&](const char* name) { return fs::exists(fs::path(path) / name, code); };
  if (!has("config.json") || (!has("model.safetensors") && !has("model.safetensors.index.json"))) {
    NFP_ASSIGN_OR_RETURN(const std::string gguf, gguf_inside(path));
    if (!gguf.empty()) return open_gguf(gguf);
  }
  auto config = read_model_text(path + "/config.json", size_t{16} << 20);
  if (!config.ok()) return other_form(path, std::move(config).error());
  NFP_ASSIGN_OR_RETURN(const auto root, parse_model_json<nlohmann::json>(*config, path + "/config.json"));
  const bool nested = root.contains("nestedfp");
  return nested ? open_nested(path, std::move(*config)) : open_plain_directory(path, std::move(*config));
}

}  // namespace

Result<std::unique_ptr<ModelSource>> ModelSource::open(const std::string& model) {
  std::error_code code;
  if (fs::is_directory(model, code)) return open_directory(model);
  if (fs::exists(model, code)) {
    if (!model.ends_with(".safetensors") && !model.ends_with(".json")) return open_gguf(model);
    return error(ErrorCode::kUsage, "{}: is one file of a model; give the directory that it lies in", model);
  }
  if (const auto name = parse_hub_name(model)) {
    NFP_ASSIGN_OR_RETURN(const std::string found, find_in_hub_cache(*name));
    return name->file.empty() ? open_directory(found) : open_gguf(found);
  }
  return error(
      ErrorCode::kNotFound,
      "{}: no such file or directory; MODEL is a directory, a .gguf file, or org/name in the Hugging Face cache",
      model);
}

void ModelSource::add_tensor(TensorInfo tensor) {
  by_name_.emplace(tensor.name, tensors_.size());
  tensors_.push_back(std::move(tensor));
}

void ModelSource::describe_as(const ModelSource& other) {
  config_json_ = other.config_json_;
  generation_json_ = other.generation_json_;
  gguf_tokenizer_ = other.gguf_tokenizer_;
  stored_fp8_ = other.stored_fp8_;
}

const TensorInfo* ModelSource::find(std::string_view name) const {
  const auto place = by_name_.find(name);
  return place == by_name_.end() ? nullptr : &tensors_[place->second];
}

Result<const TensorInfo*> ModelSource::need(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing; the checkpoint is incomplete", path_, name);
  }
  if (!is_weight_float(tensor->dtype)) return no_weight(path_, *tensor);
  return tensor;
}

uint64_t ModelSource::file_bytes() const {
  uint64_t bytes = 0;
  for (const TensorInfo& tensor : tensors_) bytes += tensor.file_bytes;
  return bytes;
}

Result<std::optional<std::string>> ModelSource::text_file(const std::string& name) const {
  std::string place = path_ + "/" + name;
  if (kind_ == SourceKind::kGguf) {
    if (name != "generation_config.json") return std::optional<std::string>();
    place = path_.substr(0, path_.size() - (path_.ends_with(".gguf") ? 5 : 0)) + "." + name;
  }
  auto text = read_model_text(place);
  if (text.ok()) return std::optional<std::string>(std::move(text).value());
  if (text.error().code == ErrorCode::kNotFound) {
    return generation_json_.empty() || name != "generation_config.json" ? std::optional<std::string>()
                                                                        : std::optional<std::string>(generation_json_);
  }
  return std::move(text).error();
}

Status ModelSource::read_f32(std::string_view name, std::span<float> out) const {
  NFP_ASSIGN_OR_RETURN(const TensorInfo* tensor, need(name));
  const auto elements = static_cast<size_t>(tensor->shape.elements());
  if (elements != out.size()) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} elements, expected {}", path_, name, elements,
                 out.size());
  }
  std::vector<std::byte> raw(elements * size_of(tensor->dtype));
  NFP_RETURN_IF_ERROR(read_rows(*tensor, 0, tensor->rows(), raw.data()));
  release(*tensor);
  if (tensor->dtype == DType::kF32) {
    std::memcpy(out.data(), raw.data(), raw.size());
  } else {
    for (size_t i = 0; i < elements; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, raw.data() + 2 * i, 2);
      out[i] = tensor->dtype == DType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits);
    }
  }
  for (float value : out) {
    if (!(value - value == 0.0f)) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' holds NaN or infinity; the checkpoint is damaged", path_,
                   name);
    }
  }
  return ok_status();
}

Status ModelSource::read_fp16_rows(std::string_view name, int64_t first, int64_t count, uint16_t* out) const {
  NFP_ASSIGN_OR_RETURN(const TensorInfo* tensor, need(name));
  const auto elements = static_cast<size_t>(count * tensor->row_elements());
  if (tensor->dtype == DType::kF32) {
    std::vector<float> values(elements);
    NFP_RETURN_IF_ERROR(read_rows(*tensor, first, count, reinterpret_cast<std::byte*>(values.data())));
    for (size_t i = 0; i < elements; ++i) out[i] = fp32_to_fp16(values[i]);
    return ok_status();
  }
  NFP_RETURN_IF_ERROR(read_rows(*tensor, first, count, reinterpret_cast<std::byte*>(out)));
  if (tensor->dtype == DType::kBF16) {
    for (size_t i = 0; i < elements; ++i) out[i] = fp32_to_fp16(bf16_to_fp32(out[i]));
  }
  return ok_status();
}

Result<MatrixSource> ModelSource::matrix_source(std::string_view name) const {
  NFP_ASSIGN_OR_RETURN(const TensorInfo* tensor, need(name));
  if (tensor->shape.rank() != 2 || tensor->shape[0] < 1 || tensor->shape[1] < 1) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is not a matrix", path_, name);
  }
  MatrixSource source;
  source.name = path_ + ": " + tensor->name;
  source.rows = tensor->shape[0];
  source.cols = tensor->shape[1];
  source.type = weight_type(tensor->dtype);
  if (tensor->dtype == DType::kBF16) {
    source.read = [this, tensor](int64_t first, int64_t count, uint16_t* out) {
      return read_rows(*tensor, first, count, reinterpret_cast<std::byte*>(out));
    };
  } else {
    source.read = [this, tensor](int64_t first, int64_t count, uint16_t* out) {
      return read_fp16_rows(tensor->name, first, count, out);
    };
  }
  source.done = [this, tensor] { release(*tensor); };
  return source;
}

Result<std::unique_ptr<MatrixReader>> ModelSource::matrix(std::string_view name, ThreadPool& threads,
                                                          MatrixAnalysis* analysis) const {
  NFP_ASSIGN_OR_RETURN(MatrixSource source, matrix_source(name));
  Narrowed narrowed;
  MatrixSource counted = source;
  if (const TensorInfo* tensor = find(name); tensor->dtype == DType::kF32) {
    counted.read = [this, tensor, &narrowed](int64_t first, int64_t count, uint16_t* out) {
      return narrow_rows(*this, *tensor, first, count, out, narrowed);
    };
  }
  NFP_ASSIGN_OR_RETURN(MatrixAnalysis found, analyse_matrix(counted, threads));
  // A row's exponent loses nothing of what FP16 holds.
  found.inexact_fp16 += narrowed.changed;
  found.inexact_nested += narrowed.changed;
  found.largest_error_fp16 = std::max(found.largest_error_fp16, narrowed.largest_error);
  found.largest_error_nested = std::max(found.largest_error_nested, narrowed.largest_error);
  if (analysis != nullptr) *analysis = found;
  return make_matrix_reader(std::move(source), std::move(found));
}

}  // namespace nfp
