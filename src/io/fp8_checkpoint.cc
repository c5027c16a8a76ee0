#include "io/fp8_checkpoint.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/float_types.h"
#include "io/model_json.h"

namespace nfp {
namespace {

using SortedJson = nlohmann::json;

constexpr std::string_view kWeightSuffix = ".weight";

std::string string_field(const SortedJson& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

class Scheme {
 public:
  Scheme(const SortedJson& object, const std::string& name) : object_(object), name_(name) {}

  Result<std::optional<Fp8Scheme>> read() {
    scheme_.method = string_field(object_, "quant_method");
    if (scheme_.method == "fp8") {
      const auto format = object_.find("fmt");
      if (format != object_.end() && !format->is_null() && *format != "e4m3") {
        return error(ErrorCode::kUnsupported,
                     "{}: quantization_config: field 'fmt' is {}; only weights in e4m3 are supported; load the FP16 or "
                     "BF16 original",
                     name_, format->dump(-1, ' ', true, SortedJson::error_handler_t::replace).substr(0, 60));
      }
      NFP_RETURN_IF_ERROR(block(object_, "weight_block_size"));
      return std::optional(scheme_);
    }
    if (scheme_.method == "fbgemm_fp8") return std::optional(scheme_);
    if (scheme_.method == "compressed-tensors") {
      NFP_RETURN_IF_ERROR(compressed_tensors());
      return std::optional(scheme_);
    }
    if (scheme_.method == "modelopt") {
      const std::string algorithm = string_field(object_, "quant_algo");
      if (algorithm == "FP8") return std::optional(scheme_);
      return error(ErrorCode::kUnsupported,
                   "{}: quantization_config: field 'quant_algo' is {}; of modelopt only FP8 is supported; load the "
                   "FP16 or BF16 original",
                   name_, algorithm.empty() ? "missing" : "'" + algorithm + "'");
    }
    return error(ErrorCode::kUnsupported,
                 "{}: field 'quantization_config' has the quant_method '{}', which is not supported; supported are the "
                 "8-bit floats of fp8, fbgemm_fp8, compressed-tensors and modelopt; load the FP16 or BF16 original",
                 name_, scheme_.method.empty() ? "not given" : scheme_.method);
  }

 private:
  Error refused(std::string_view field, const std::string& value) const {
    return error(ErrorCode::kUnsupported,
                 "{}: quantization_config: field '{}' is {}; of compressed-tensors only 8-bit floats with a scale for "
                 "each tensor, row or block are supported; load the FP16 or BF16 original",
                 name_, field, value.empty() ? "missing" : "'" + value + "'");
  }

  Status compressed_tensors() {
    const std::string format = string_field(object_, "format");
    if (format != "float-quantized" && format != "naive-quantized") return refused("format", format);
    // What turns weights or activations as the model runs is a part of it.
    const auto transforms = object_.find("transform_config");
    if (transforms != object_.end() && !transforms->is_null() && !transforms->empty()) {
      return refused("transform_config", "given");
    }
    const auto sparsity = object_.find("sparsity_config");
    if (sparsity != object_.end() && sparsity->is_object() && !sparsity->empty()) {
      const std::string kept = string_field(*sparsity, "format");
      if (kept != "dense") return refused("sparsity_config.format", kept);
    }
    const auto groups = object_.find("config_groups");
    if (groups == object_.end() || !groups->is_object()) return refused("config_groups", "");
    for (const auto& [group, value] : groups->items()) {
      const SortedJson* weights = value.is_object() && value.contains("weights") ? &value["weights"] : nullptr;
      if (weights == nullptr || !weights->is_object()) return refused("weights", "");
      const auto bits = weights->find("num_bits");
      const std::string type = string_field(*weights, "type"), strategy = string_field(*weights, "strategy");
      if (bits == weights->end() || *bits != 8) return refused("num_bits", bits == weights->end() ? "" : bits->dump());
      if (type != "float") return refused("type", type);
      if (strategy != "tensor" && strategy != "channel" && strategy != "block") return refused("strategy", strategy);
      if (strategy == "block") NFP_RETURN_IF_ERROR(block(*weights, "block_structure"));
    }
    return ok_status();
  }

  Status block(const SortedJson& object, const char* field) {
    const auto found = object.find(field);
    if (found == object.end() || found->is_null()) return ok_status();
    const auto whole = [](const SortedJson& size) {
      return size.is_number_integer() && size.get<int64_t>() >= 1 && size.get<int64_t>() <= 1 << 20;
    };
    if (!found->is_array() || found->size() != 2 || !whole((*found)[0]) || !whole((*found)[1])) {
      return error(ErrorCode::kInvalidInput, "{}: quantization_config: field '{}' must be two whole numbers above 0",
                   name_, field);
    }
    scheme_.block_rows = (*found)[0].get<int64_t>();
    scheme_.block_columns = (*found)[1].get<int64_t>();
    return ok_status();
  }

  const SortedJson& object_;
  const std::string& name_;
  Fp8Scheme scheme_;
};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// As FP32 values.
Result<std::vector<float>> read_scales(const ShardSet& shards, const SafetensorsEntry& entry, const std::string& path) {
  if (!is_weight_float(entry.dtype)) {
    return error(ErrorCode::kUnsupported, "{}: tensor '{}' has dtype {}; scales must be F32, BF16 or F16", path,
                 entry.name, entry.stored);
  }
  std::vector<float> scales(static_cast<size_t>(entry.shape.elements()));
  const std::span<const std::byte> bytes = shards.bytes(entry);
  for (size_t i = 0; i < scales.size(); ++i) {
    uint16_t half = 0;
    if (entry.dtype == DType::kF32) {
      std::memcpy(&scales[i], bytes.data() + 4 * i, 4);
    } else {
      std::memcpy(&half, bytes.data() + 2 * i, 2);
      scales[i] = entry.dtype == DType::kF16 ? fp16_to_fp32(half) : bf16_to_fp32(half);
    }
    // A row's factor is 2^8 times it, a number too.
    if (!(scales[i] >= 0 && scales[i] <= 0x1p100f)) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' holds {}, which is no scale; the checkpoint is damaged",
                   path, entry.name, scales[i]);
    }
  }
  return scales;
}

class Fp8Reader final : public MatrixReader {
 public:
  Fp8Reader(const Fp8Matrix& matrix, std::span<const std::byte> codes, std::string name, std::function<void()> done)
      : matrix_(matrix),
        codes_(reinterpret_cast<const uint8_t*>(codes.data())),
        name_(std::move(name)),
        done_(std::move(done)) {}
  ~Fp8Reader() override {
    if (done_) done_();
  }

  int64_t rows() const override { return matrix_.codes->shape[0]; }
  int64_t cols() const override { return matrix_.codes->shape[1]; }
  Storage storage() const override { return Storage::kNested; }
  const std::string& name() const override { return name_; }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    for (int64_t r = first; r < first + count; ++r, out += cols()) {
      fp8_row_to_fp16(matrix_, r, row(r), out);
      // Only nested rows, which have FP32 factors, hold such weights.
      if (std::any_of(out, out + cols(), [](uint16_t w) { return (w & 0x7fffu) >= 0x7c00u; })) {
        return error(ErrorCode::kUnsupported, "{}: a weight in row {} is beyond FP16; read the matrix nested", name_,
                     r);
      }
    }
    return ok_status();
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    std::fill_n(exponent, count, int8_t{0});
    const auto bytes = static_cast<size_t>(count * cols());
    std::memcpy(upper, row(first).data(), bytes);
    // The code's three mantissa bits are FP16's first three, of which the third is the lower byte's first.
    for (size_t i = 0; i < bytes; ++i) lower[i] = static_cast<uint8_t>(upper[i] << 7);
    return ok_status();
  }
  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    for (int64_t i = 0; i < count; ++i) factor[i] = 256.0f * matrix_.scales[static_cast<size_t>(first + i)];
    return ok_status();
  }

 private:
  std::span<const uint8_t> row(int64_t r) const { return {codes_ + r * cols(), static_cast<size_t>(cols())}; }

  const Fp8Matrix& matrix_;
  const uint8_t* codes_;
  const std::string name_;
  const std::function<void()> done_;
};

}  // namespace

Result<std::optional<Fp8Scheme>> find_fp8_scheme(std::string_view config_json, const std::string& name) {
  NFP_ASSIGN_OR_RETURN(const auto root, parse_model_json<SortedJson>(config_json, name));
  if (root.contains("nestedfp")) return std::optional<Fp8Scheme>();
  const auto found = root.find("quantization_config");
  if (found == root.end() || !found->is_object()) return std::optional<Fp8Scheme>();
  return Scheme(*found, name).read();
}

bool Fp8Weights::is_scale(std::string_view tensor) {
  constexpr std::string_view kSuffixes[] = {".weight_scale", ".weight_scale_inv", ".input_scale", ".input_scale_ub",
                                            ".k_scale",      ".v_scale",          ".q_scale",     ".output_scale"};
  return std::any_of(std::begin(kSuffixes), std::end(kSuffixes),
                     [&](std::string_view suffix) { return tensor.ends_with(suffix); });
}

Result<Fp8Weights> Fp8Weights::open(const ShardSet& shards, const Fp8Scheme& scheme, const std::string& path) {
  Fp8Weights weights;
  weights.method_ = scheme.method;
  for (const SafetensorsEntry* entry : shards.entries()) {
    if (entry->dtype != DType::kF8E4M3 || !entry->name.ends_with(kWeightSuffix) || entry->shape.rank() != 2) continue;
    const SafetensorsEntry* scales = shards.find(entry->name + "_scale");
    if (scales == nullptr) scales = shards.find(entry->name + "_scale_inv");  // which multiplies all the same
    if (scales == nullptr) {
      return error(ErrorCode::kInvalidInput,
                   "{}: tensor '{}' is {} and has no '{}_scale'; the checkpoint is incomplete", path, entry->name,
                   info(entry->dtype).safetensors_name, entry->name);
    }
    if (entry->shape.elements() == 0) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is empty; the checkpoint is damaged", path, entry->name);
    }
    Fp8Matrix matrix;
    matrix.codes = entry;
    NFP_ASSIGN_OR_RETURN(matrix.scales, read_scales(shards, *scales, path));
    const int64_t rows = entry->shape[0], columns = entry->shape[1], count = scales->shape.elements();
    const bool by_blocks = scheme.block_rows > 0 && scales->shape.rank() == 2 &&
                           scales->shape[0] == blocks_of(rows, scheme.block_rows) &&
                           scales->shape[1] == blocks_of(columns, scheme.block_columns);
    if (count == 1) {
      matrix.scales.assign(static_cast<size_t>(rows), matrix.scales.front());
    } else if (by_blocks) {
      matrix.block_rows = scheme.block_rows;
      matrix.block_columns = scheme.block_columns;
    } else if (count != rows || (scales->shape.rank() > 1 && scales->shape[0] != rows)) {
      return error(
          ErrorCode::kUnsupported,
          "{}: tensor '{}' has {} scales for a matrix of {} x {}: neither one, nor one a row, nor one for each "
          "block that quantization_config names",
          path, scales->name, count, rows, columns);
    }
    (matrix.block_rows > 0 ? weights.by_blocks_ : weights.by_rows_) += 1;
    weights.matrices_.emplace(entry->name, std::move(matrix));
  }
  return weights;
}

const Fp8Matrix* Fp8Weights::find(std::string_view tensor) const {
  const auto place = matrices_.find(tensor);
  return place == matrices_.end() ? nullptr : &place->second;
}

std::string Fp8Weights::text() const {
  std::string text = method_ + ": ";
  if (by_rows_ > 0) text += fmt::format("{} matrices with a scale for the matrix or each row", by_rows_);
  if (by_rows_ > 0 && by_blocks_ > 0) text += ", ";
  if (by_blocks_ > 0) text += fmt::format("{} matrices with a scale for each block", by_blocks_);
  return text;
}

void fp8_row_to_fp16(const Fp8Matrix& matrix, int64_t r, std::span<const uint8_t> codes, uint16_t* out) {
  const auto columns = static_cast<int64_t>(codes.size());
  const bool blocks = matrix.block_rows > 0;
  const int64_t width = blocks ? matrix.block_columns : columns;
  const float* scales =
      matrix.scales.data() + (blocks ? r / matrix.block_rows * blocks_of(columns, matrix.block_columns) : r);
  for (int64_t c = 0; c < columns; c += width, ++scales) {
    const int64_t end = std::min(columns, c + width);
    for (int64_t i = c; i < end; ++i) out[i] = fp32_to_fp16(e4m3_to_fp32(codes[static_cast<size_t>(i)]) * *scales);
  }
}

Result<std::unique_ptr<MatrixReader>> make_fp8_reader(const Fp8Matrix& matrix, std::span<const std::byte> codes,
                                                      std::string name, std::function<void()> done, ThreadPool& threads,
                                                      MatrixAnalysis* analysis) {
  const int64_t rows = matrix.codes->shape[0], columns = matrix.codes->shape[1];
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes.data());
  std::mutex mutex;
  int64_t nan_row = rows, largest_row = 0;
  float largest = 0;
  threads.parallel_for(rows, 16, [&](Range range) {
    int64_t mine_nan = rows, mine_row = range.begin;
    float mine = 0;
    for (int64_t r = range.begin; r < range.end; ++r) {
      uint8_t most = 0;
      for (int64_t c = 0; c < columns; ++c) most = std::max<uint8_t>(most, bytes[r * columns + c] & 0x7fu);
      if (most == 0x7f) mine_nan = std::min(mine_nan, r);
      const float value = most == 0x7f ? 0.0f : e4m3_to_fp32(most) * matrix.scales[static_cast<size_t>(r)];
      if (value > mine) {
        mine = value;
        mine_row = r;
      }
    }
    const std::lock_guard lock(mutex);
    nan_row = std::min(nan_row, mine_nan);
    if (mine > largest || (mine == largest && mine_row < largest_row)) {
      largest = mine;
      largest_row = mine_row;
    }
  });
  if (nan_row < rows) {
    return error(ErrorCode::kInvalidInput, "{}: row {} holds a NaN; the checkpoint is damaged", name, nan_row);
  }
  if (analysis != nullptr) {
    *analysis = {};
    analysis->storage = Storage::kNested;
    analysis->exponents.assign(static_cast<size_t>(rows), 0);
    analysis->largest = largest;
    analysis->largest_row = largest_row;
    analysis->nests_by_paper = largest <= 1.75f;
  }
  return std::unique_ptr<MatrixReader>(std::make_unique<Fp8Reader>(matrix, codes, std::move(name), std::move(done)));
}

}  // namespace nfp
