// A nested checkpoint (docs/format.md, "On disk"), seen as the model it was made from.
#include <simdjson.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "base/float_types.h"
#include "io/gguf_tokenizer.h"
#include "io/nested_checkpoint.h"
#include "io/shard_set.h"
#include "io/sources.h"
#include "nested/format.h"

namespace nfp {
namespace {

struct Planes {
  const SafetensorsEntry* upper = nullptr;
  const SafetensorsEntry* lower = nullptr;
  std::vector<int8_t> exponents;  // [rows]
};

// Both neighbours of a number agree with its lower byte in all but one bit; anything else is damage.
Status check_planes(const std::string& name, int64_t first, const uint8_t* upper, const uint8_t* lower, size_t bytes) {
  uint32_t wrong = 0;
  for (size_t i = 0; i < bytes; ++i) {
    const uint16_t w = join(upper[i], lower[i]);
    const uint8_t down = static_cast<uint8_t>(((w & 0x7fffu) >> 7) | ((w >> 8) & 0x80u));
    // A number that E4M3 holds exactly has no other neighbour (448 would have NaN).
    const auto up = static_cast<uint8_t>(down + ((w & 0x7fu) != 0 ? 1 : 0));
    wrong |= static_cast<uint32_t>(upper[i] != down && upper[i] != up) | static_cast<uint32_t>(!is_nestable(w));
  }
  if (wrong == 0) return ok_status();
  return error(ErrorCode::kInvalidInput,
               "{}: upper and lower bytes do not belong together near row {}; the files are damaged or of different "
               "models",
               name, first);
}

class NestedSource final : public ModelSource {
 public:
  explicit NestedSource(const std::string& path) : ModelSource(SourceKind::kNested, path) {}

  Status open_files(std::string config_json) {
    config_json_ = std::move(config_json);
    NFP_ASSIGN_OR_RETURN(info_, parse_nested_info(config_json_, path_ + "/config.json"));
    NFP_ASSIGN_OR_RETURN(main_, ShardSet::open(path_, "model"));
    NFP_ASSIGN_OR_RETURN(lower_, ShardSet::open(path_ + "/" + info_.lower_directory, "lower"));
    for (const SafetensorsEntry* entry : main_.entries()) {
      if (entry->name.ends_with(kScaleSuffix)) continue;
      if (entry->dtype == DType::kF8E4M3) {
        NFP_RETURN_IF_ERROR(add_nested(*entry));
      } else {
        add_tensor({entry->name, entry->dtype, entry->stored, entry->shape, entry->end - entry->begin});
      }
    }
    if (planes_.size() != lower_.entries().size()) {
      return error(ErrorCode::kInvalidInput, "{}: has {} lower planes for {} nested matrices; convert the model again",
                   path_, lower_.entries().size(), planes_.size());
    }
    NFP_ASSIGN_OR_RETURN(tokenizer_file_, read_tokenizer_gguf(path_, gguf_tokenizer_));
    return ok_status();
  }

  Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& threads,
                                               MatrixAnalysis* analysis) const override;

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto cols = static_cast<size_t>(tensor.row_elements());
    const auto place = planes_.find(tensor.name);
    if (place == planes_.end()) {
      const size_t row = cols * size_of(tensor.dtype);
      const std::span<const std::byte> bytes = main_.bytes(*main_.find(tensor.name));
      std::memcpy(out, bytes.data() + static_cast<size_t>(first) * row, static_cast<size_t>(count) * row);
      return ok_status();
    }
    auto* values = reinterpret_cast<uint16_t*>(out);
    for (int64_t r = first; r < first + count; ++r, values += cols) {
      const uint8_t* uppers = upper(place->second) + static_cast<size_t>(r) * cols;
      const uint8_t* lowers = lower(place->second) + static_cast<size_t>(r) * cols;
      NFP_RETURN_IF_ERROR(check_planes(path_ + ": " + tensor.name, r, uppers, lowers, cols));
      join(uppers, lowers, cols, values);
      restore_row(std::span(values, cols), place->second.exponents[static_cast<size_t>(r)], tensor.dtype);
    }
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override {
    const auto place = planes_.find(tensor.name);
    if (place == planes_.end()) return main_.release(*main_.find(tensor.name));
    main_.release(*place->second.upper);
    lower_.release(*place->second.lower);
  }

  const uint8_t* upper(const Planes& p) const { return reinterpret_cast<const uint8_t*>(main_.bytes(*p.upper).data()); }
  const uint8_t* lower(const Planes& p) const {
    return reinterpret_cast<const uint8_t*>(lower_.bytes(*p.lower).data());
  }
  bool restricted() const { return info_.uppers != UpperRule::kFree; }

 private:
  Error bad(const std::string& tensor, std::string_view what) const {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' {}; convert the model again", path_, tensor, what);
  }

  // v * 2^e in the source's dtype. For FP16 this is exact; for BF16 it is where the matrix nested exactly.
  static void restore_row(std::span<uint16_t> row, int exponent, DType dtype) {
    if (dtype == DType::kF16 && exponent == 0) return;
    for (uint16_t& bits : row) {
      const float value = std::ldexp(fp16_to_fp32(bits), exponent);
      bits = dtype == DType::kBF16 ? fp32_to_bf16(value) : fp32_to_fp16(value);
    }
  }

  Status add_nested(const SafetensorsEntry& upper) {
    if (!upper.name.ends_with(".weight") || upper.shape.rank() != 2)
      return bad(upper.name, "is FP8 but no weight matrix");
    Planes planes;
    planes.upper = &upper;
    planes.lower = lower_.find(upper.name + "_lower");
    if (planes.lower == nullptr) return bad(upper.name + "_lower", "is missing");
    if (planes.lower->dtype != DType::kU8 || !(planes.lower->shape == upper.shape)) {
      return bad(upper.name + "_lower", "must be U8 and of its matrix's shape");
    }
    const SafetensorsEntry* scale = main_.find(upper.name + "_scale");
    if (scale == nullptr) return bad(upper.name + "_scale", "is missing");
    if (scale->dtype != DType::kF32 || scale->shape.elements() != upper.shape[0]) {
      return bad(upper.name + "_scale", "must be F32 with one value a row");
    }
    const std::byte* values = main_.bytes(*scale).data();
    for (int64_t r = 0; r < upper.shape[0]; ++r) {
      float value = 0;
      std::memcpy(&value, values + 4 * r, sizeof(value));
      int e = 0;
      if (!(value > 0) || std::frexp(value, &e) != 0.5f || e - 1 + 8 < kMinRowExponent || e - 1 + 8 > kMaxRowExponent) {
        return bad(upper.name + "_scale",
                   fmt::format("holds {} in row {}, which is no power of two in range", value, r));
      }
      planes.exponents.push_back(static_cast<int8_t>(e - 1 + 8));  // scale = 2^(e - 8)
    }
    TensorInfo info;
    info.name = upper.name;
    info.dtype = info_.dtype_of(upper.name);
    info.stored = "nested";
    info.shape = upper.shape;
    info.file_bytes = 2 * (upper.end - upper.begin);
    planes_.emplace(upper.name, std::move(planes));
    add_tensor(std::move(info));
    return ok_status();
  }

  NestedInfo info_;
  ShardSet main_, lower_;
  std::map<std::string, Planes, std::less<>> planes_;
  MappedFile tokenizer_file_;
};

// Rows straight from the two planes.
class PlanesReader final : public MatrixReader {
 public:
  PlanesReader(const NestedSource& source, const Planes& planes, const TensorInfo& tensor)
      : source_(source), planes_(planes), tensor_(tensor), name_(source.path() + ": " + tensor.name) {}
  ~PlanesReader() override { source_.release(tensor_); }
  int64_t rows() const override { return tensor_.shape[0]; }
  int64_t cols() const override { return tensor_.shape[1]; }
  Storage storage() const override { return Storage::kNested; }
  const std::string& name() const override { return name_; }
  bool uppers_restricted() const override { return source_.restricted(); }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    return source_.read_fp16_rows(tensor_.name, first, count, out);
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    const auto cols = static_cast<size_t>(tensor_.shape[1]);
    const size_t at = static_cast<size_t>(first) * cols;
    const size_t bytes = static_cast<size_t>(count) * cols;
    std::memcpy(upper, source_.upper(planes_) + at, bytes);
    std::memcpy(lower, source_.lower(planes_) + at, bytes);
    std::memcpy(exponent, planes_.exponents.data() + first, static_cast<size_t>(count));
    return check_planes(name_, first, upper, lower, bytes);
  }

 private:
  const NestedSource& source_;
  const Planes& planes_;
  const TensorInfo& tensor_;
  std::string name_;
};

Result<std::unique_ptr<MatrixReader>> NestedSource::matrix(std::string_view name, ThreadPool& threads,
                                                           MatrixAnalysis* analysis) const {
  const auto place = planes_.find(name);
  if (place == planes_.end() || analysis != nullptr) {
    NFP_ASSIGN_OR_RETURN(std::unique_ptr<MatrixReader> plain, ModelSource::matrix(name, threads, analysis));
    if (place == planes_.end()) return plain;
  }
  return std::unique_ptr<MatrixReader>(std::make_unique<PlanesReader>(*this, place->second, *find(name)));
}

}  // namespace

Result<std::unique_ptr<ModelSource>> open_nested(const std::string& path, std::string config_json) {
  auto source = std::make_unique<NestedSource>(path);
  NFP_RETURN_IF_ERROR(source->open_files(std::move(config_json)));
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
