// A nested checkpoint: uppers and scales where other engines look for an FP8 model, lowers beside them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <utility>

#include "base/float_types.h"
#include "io/nested_layout.h"
#include "io/safetensors_set.h"
#include "io/sources.h"
#include "nested/format.h"

namespace nfp {
namespace {

// Where one nested matrix lies.
struct NestedTensor {
  const StoredTensor* upper = nullptr;  // F8_E4M3 [n, k]
  const StoredTensor* lower = nullptr;  // U8 [n, k]
  const StoredTensor* scale = nullptr;  // F32 [n, 1] = 2^(e-8)
  const StoredTensor* plain = nullptr;  // instead of the three: a tensor that is not nested
};

// e of a scale 2^(e-8); false where the scale is anything else.
bool exponent_of(float scale, int8_t& exponent) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  const int power = static_cast<int>(bits >> 23) - 127 + 8;
  if ((bits & 0x807fffffu) != 0 || power < kMinRowExponent || power > kMaxRowExponent) return false;
  exponent = static_cast<int8_t>(power);
  return true;
}

// No split makes these: an E4M3 NaN, or a zero upper whose lower byte says that it was rounded up.
bool are_planes_valid(std::span<const uint8_t> upper, const uint8_t* lower) {
  uint32_t bad = 0;
  for (size_t i = 0; i < upper.size(); ++i) {
    const uint32_t magnitude = upper[i] & 0x7fu;
    bad |= static_cast<uint32_t>(magnitude == 0x7fu) | (static_cast<uint32_t>(magnitude == 0) & (lower[i] >> 7));
  }
  return bad == 0;
}

class PlaneReader final : public MatrixReader {
 public:
  PlaneReader(std::string name, const NestedTensor& tensor, std::vector<int8_t> exponents, bool restricted)
      : name_(std::move(name)), tensor_(tensor), exponents_(std::move(exponents)), restricted_(restricted) {}
  ~PlaneReader() override {
    if (!releases_) return;
    for (const StoredTensor* part : {tensor_.upper, tensor_.lower, tensor_.scale}) part->file->release(part->bytes);
  }

  int64_t rows() const override { return tensor_.upper->shape[0]; }
  int64_t cols() const override { return tensor_.upper->shape[1]; }
  Storage storage() const override { return Storage::kNested; }
  const std::string& name() const override { return name_; }
  bool uppers_restricted() const override { return restricted_; }
  // Gives the pages back when the reader goes away.
  void release_when_done() { releases_ = true; }

  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    const auto at = static_cast<size_t>(first * cols());
    const auto size = static_cast<size_t>(count * cols());
    if (size == 0) return ok_status();
    std::memcpy(upper, tensor_.upper->bytes.data() + at, size);
    std::memcpy(lower, tensor_.lower->bytes.data() + at, size);
    std::copy_n(exponents_.begin() + first, count, exponent);
    if (are_planes_valid({upper, size}, lower)) return ok_status();
    return error(ErrorCode::kInvalidInput, "{}: rows {} to {} hold bytes that no weight has; the checkpoint is damaged",
                 name_, first, first + count - 1);
  }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    return read_rows(first, count, out, [](float w) { return fp32_to_fp16(w); });
  }

  // `narrow`: FP32 -> bits. The FP16 of a row with e = 0 is taken as it is.
  template <typename Narrow>
  Status read_rows(int64_t first, int64_t count, uint16_t* out, Narrow narrow, bool fp16 = true) const {
    const auto width = static_cast<size_t>(cols());
    std::vector<uint8_t> upper(width), lower(width);
    for (int64_t r = 0; r < count; ++r, out += width) {
      int8_t exponent = 0;
      NFP_RETURN_IF_ERROR(read_nested(first + r, 1, upper.data(), lower.data(), &exponent));
      join(upper.data(), lower.data(), width, out);
      if (fp16 && exponent == 0) continue;
      const float scale = std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
      for (size_t i = 0; i < width; ++i) out[i] = narrow(fp16_to_fp32(out[i]) * scale);
      if (fp16 && std::any_of(out, out + width, [](uint16_t w) { return (w & 0x7fffu) >= 0x7c00u; })) {
        return error(ErrorCode::kUnsupported, "{}: a weight in row {} is beyond FP16; read the matrix nested", name_,
                     first + r);
      }
    }
    return ok_status();
  }

 private:
  const std::string name_;
  const NestedTensor tensor_;
  const std::vector<int8_t> exponents_;
  const bool restricted_;
  bool releases_ = false;
};

class NestedSource final : public ModelSource {
 public:
  explicit NestedSource(const std::string& path) : ModelSource(SourceKind::kNested, path) {}

  Status open_files(std::string config) {
    config_json_ = std::move(config);
    NFP_ASSIGN_OR_RETURN(header_, parse_nested_header(config_json_, path_ + "/config.json"));
    NFP_ASSIGN_OR_RETURN(main_, SafetensorsSet::open(path_, kModelFile, kModelIndex));
    NFP_ASSIGN_OR_RETURN(lowers_, SafetensorsSet::open(path_ + "/" + kNestedFolder, kLowerFile, kLowerIndex));
    for (const StoredTensor& tensor : main_.tensors()) NFP_RETURN_IF_ERROR(add(tensor));
    for (const StoredTensor& lower : lowers_.tensors()) {
      if (!used_lowers_.contains(lower.name)) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has no upper half in {}; convert the model again",
                     lower.file->path(), lower.name, path_);
      }
    }
    return read_gguf_tokenizer_file();
  }

  Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& threads,
                                               MatrixAnalysis* analysis) const override {
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr || place(*tensor).plain != nullptr) return ModelSource::matrix(name, threads, analysis);
    NFP_ASSIGN_OR_RETURN(std::unique_ptr<PlaneReader> reader, open_planes(*tensor));
    reader->release_when_done();
    if (analysis != nullptr) {
      NFP_ASSIGN_OR_RETURN(const MatrixSource source, matrix_source(name));
      NFP_ASSIGN_OR_RETURN(*analysis, analyse_matrix(source, threads));
    }
    return std::unique_ptr<MatrixReader>(std::move(reader));
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const NestedTensor& at = place(tensor);
    if (at.plain != nullptr) {
      const auto row = static_cast<size_t>(tensor.row_elements()) * size_of(tensor.dtype);
      const auto bytes = at.plain->bytes.subspan(static_cast<size_t>(first) * row, static_cast<size_t>(count) * row);
      if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
      return ok_status();
    }
    NFP_ASSIGN_OR_RETURN(const std::unique_ptr<PlaneReader> reader, open_planes(tensor));
    auto* bits = reinterpret_cast<uint16_t*>(out);
    if (tensor.dtype == DType::kF16) return reader->read_fp16(first, count, bits);
    return reader->read_rows(
        first, count, bits, [](float w) { return fp32_to_bf16(w); }, /*fp16=*/false);
  }

  void release(const TensorInfo& tensor) const override {
    const NestedTensor& at = place(tensor);
    for (const StoredTensor* part : {at.plain, at.upper, at.lower, at.scale}) {
      if (part != nullptr) part->file->release(part->bytes);
    }
  }

 private:
  const NestedTensor& place(const TensorInfo& tensor) const { return places_[&tensor - tensors().data()]; }

  Status add(const StoredTensor& tensor) {
    if (tensor.dtype != DType::kF8E4M3) {
      if (tensor.name.ends_with("weight_scale")) return ok_status();  // taken with its matrix below
      add_tensor({tensor.name, tensor.dtype, std::string(info(tensor.dtype).safetensors_name), tensor.shape,
                  tensor.bytes.size()});
      places_.push_back({.plain = &tensor});
      return ok_status();
    }
    NestedTensor nested{&tensor, lowers_.find(lower_name(tensor.name)), main_.find(scale_name(tensor.name)), nullptr};
    const auto bad = [&](std::string_view what) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' {}; convert the model again", tensor.file->path(),
                   tensor.name, what);
    };
    if (tensor.shape.rank() != 2) return bad("is FP8 but not a matrix");
    if (nested.lower == nullptr) return bad("has no lower half in the folder nestedfp");
    if (nested.scale == nullptr) return bad("has no weight_scale");
    if (nested.lower->dtype != DType::kU8 || nested.lower->shape != tensor.shape) {
      return bad("has a lower half of another shape or dtype");
    }
    if (nested.scale->dtype != DType::kF32 || nested.scale->shape != Shape{tensor.shape[0], 1}) {
      return bad("has a weight_scale of another shape or dtype; it must be F32 [rows, 1]");
    }
    used_lowers_.insert(nested.lower->name);
    add_tensor({tensor.name, header_.dtype_of(tensor.name), "nested", tensor.shape,
                tensor.bytes.size() + nested.lower->bytes.size() + nested.scale->bytes.size()});
    places_.push_back(nested);
    return ok_status();
  }

  Result<std::unique_ptr<PlaneReader>> open_planes(const TensorInfo& tensor) const {
    const NestedTensor& at = place(tensor);
    std::vector<int8_t> exponents(static_cast<size_t>(tensor.shape[0]));
    for (size_t r = 0; r < exponents.size(); ++r) {
      float scale = 0;
      std::memcpy(&scale, at.scale->bytes.data() + r * sizeof(scale), sizeof(scale));
      if (!exponent_of(scale, exponents[r])) {
        return error(ErrorCode::kInvalidInput,
                     "{}: tensor '{}' row {} is {}, not a power of two that nesting makes; convert the model again",
                     at.scale->file->path(), at.scale->name, r, scale);
      }
    }
    return std::make_unique<PlaneReader>(path_ + ": " + tensor.name, at, std::move(exponents),
                                         header_.uppers_restricted);
  }

  NestedHeader header_;
  SafetensorsSet main_, lowers_;
  std::set<std::string, std::less<>> used_lowers_;
  std::vector<NestedTensor> places_;  // in the order of tensors()
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_nested(const std::string& path, std::string config) {
  auto source = std::make_unique<NestedSource>(path);
  NFP_RETURN_IF_ERROR(source->open_files(std::move(config)));
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
