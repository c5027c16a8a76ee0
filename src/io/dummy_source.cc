#include "io/dummy_source.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/float_types.h"
#include "io/model_json.h"
#include "io/text_model.h"
#include "nested/matrix_analysis.h"

namespace nfp {
namespace {

constexpr size_t kPool = size_t{32} << 20;  // numbers
constexpr uint16_t kOne = 0x3c00;           // FP16 of 1

// The steps and the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
// generators").
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
constexpr uint64_t scramble(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// FNV-1a, so that a name's numbers do not depend on the standard library.
uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// FP16 of sigma times the normal distribution's quantiles at (i + 1/2) / 2^16, by Newton's method from one to the next.
std::vector<uint16_t> normal_quantiles(double sigma) {
  constexpr int kCount = 1 << 16;
  std::vector<uint16_t> out(kCount);
  double x = 0;
  for (int i = kCount / 2; i < kCount; ++i) {
    const double above = 1.0 - (i + 0.5) / kCount;  // probability of more than x
    for (int step = 0; step < 4; ++step) {
      const double density = std::exp(-0.5 * x * x) * 0.3989422804014327;
      x += (0.5 * std::erfc(x * 0.7071067811865476) - above) / density;
    }
    out[static_cast<size_t>(i)] = fp32_to_fp16(static_cast<float>(sigma * x));
    out[static_cast<size_t>(kCount - 1 - i)] = out[static_cast<size_t>(i)] | 0x8000u;
  }
  return out;
}

class DummySource final : public ModelSource {
 public:
  DummySource(DummyConfig config, const std::vector<DummyTensor>& tensors, uint64_t seed)
      : ModelSource(SourceKind::kHuggingFace, std::move(config.directory)), pool_(kPool) {
    config_json_ = std::move(config.json);
    for (const DummyTensor& tensor : tensors) {
      TensorInfo info;
      info.name = tensor.name;
      info.dtype = DType::kF16;
      info.stored = "random";
      info.shape = tensor.shape;
      info.file_bytes = info.bytes();  // what loading reports progress by
      add_tensor(std::move(info));
      kinds_.push_back(tensor.kind);
      keys_.push_back(scramble(seed + kGolden * hash_name(tensor.name)));
    }
    const std::vector<uint16_t> quantiles = normal_quantiles(kDummySigma);
    largest_ = fp16_to_fp32(quantiles.back());
    for (size_t i = 0; i < kPool; i += 4) {
      const uint64_t bits = scramble(seed + kGolden * (i / 4 + 1));
      for (size_t j = 0; j < 4; ++j) pool_[i + j] = quantiles[bits >> (16 * j) & 0xffffu];
    }
  }

  // No weight is near 1.75, so that every row nests with exponent 0 and nothing has to be read to find out.
  Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& /*threads*/,
                                               MatrixAnalysis* analysis) const override {
    NFP_ASSIGN_OR_RETURN(MatrixSource source, matrix_source(name));
    MatrixAnalysis found;
    found.storage = Storage::kNested;
    found.exponents.assign(static_cast<size_t>(source.rows), 0);
    found.nests_by_paper = true;
    found.largest = kind(*find(name)) == DummyTensor::Kind::kOnes ? 1.0f : largest_;
    if (analysis != nullptr) *analysis = found;
    return make_matrix_reader(std::move(source), std::move(found));
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto elements = static_cast<size_t>(tensor.row_elements());
    auto* to = reinterpret_cast<uint16_t*>(out);
    if (kind(tensor) == DummyTensor::Kind::kOnes) {
      std::fill_n(to, static_cast<size_t>(count) * elements, kOne);
      return ok_status();
    }
    const uint64_t key = keys_[index(tensor)];
    for (int64_t r = first; r < first + count; ++r) {
      size_t at = scramble(key + kGolden * static_cast<uint64_t>(r)) % kPool;
      for (size_t done = 0; done < elements;) {
        const size_t now = std::min(elements - done, kPool - at);
        std::memcpy(to + done, pool_.data() + at, now * sizeof(uint16_t));
        done += now;
        at = 0;
      }
      to += elements;
    }
    return ok_status();
  }
  void release(const TensorInfo& /*tensor*/) const override {}

 private:
  size_t index(const TensorInfo& tensor) const { return static_cast<size_t>(&tensor - tensors().data()); }
  DummyTensor::Kind kind(const TensorInfo& tensor) const { return kinds_[index(tensor)]; }

  std::vector<DummyTensor::Kind> kinds_;  // in the order of tensors()
  std::vector<uint64_t> keys_;            // likewise
  std::vector<uint16_t> pool_;
  float largest_ = 0;
};

}  // namespace

Result<DummyConfig> read_dummy_config(const std::string& config) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const bool is_directory = fs::is_directory(config, ignored);
  if (!is_directory && fs::exists(config, ignored) && fs::path(config).extension() != ".json") {
    return error(ErrorCode::kUsage, "{}: random weights need a config.json, or a folder with one", config);
  }
  const std::string file = is_directory ? config + "/config.json" : config;
  DummyConfig out;
  out.directory = is_directory ? config : fs::path(config).parent_path().string();
  if (out.directory.empty()) out.directory = ".";
  NFP_ASSIGN_OR_RETURN(out.json, read_model_text(file, size_t{16} << 20));
  NFP_ASSIGN_OR_RETURN(auto text, text_model_config(out.json, file));
  if (text) out.json = std::move(*text);
  return out;
}

std::unique_ptr<ModelSource> make_dummy_source(DummyConfig config, const std::vector<DummyTensor>& tensors,
                                               uint64_t seed) {
  return std::make_unique<DummySource>(std::move(config), tensors, seed);
}

}  // namespace nfp
