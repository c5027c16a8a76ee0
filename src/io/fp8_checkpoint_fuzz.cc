// A checkpoint whose matrices are FP8, opened as a model's directory is and read whole: the first line of the input is
// config.json, the rest the header of model.safetensors. What opens must be readable, and what is nested must be the
// file's codes times its scales.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "base/float_types.h"
#include "base/log.h"
#include "base/testing/scratch_folder.h"
#include "io/sources.h"
#include "nested/format.h"

namespace {

constexpr size_t kDataBytes = 256;
constexpr int64_t kMostElements = 1 << 16;  // of a matrix that is read, at most kDataBytes anyway where it has columns

const std::string& folder() {
  static const nfp::testing::ScratchFolder scratch;
  return scratch.path();
}

void write_weights(std::string_view header) {
  const uint64_t length = header.size();
  std::ofstream file(folder() + "/model.safetensors", std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file.write(header.data(), static_cast<std::streamsize>(length));
  // Codes of every kind, FP32 scales of 1.0 to 1.9 and, at the end, what is no scale.
  char data[kDataBytes];
  for (size_t i = 0; i < kDataBytes; ++i) data[i] = static_cast<char>(i * 37);
  const float scale = 1.0f;
  for (size_t i = 128; i < 192; i += 4) {
    const float value = scale + 0.05f * static_cast<float>((i - 128) / 4);
    std::memcpy(data + i, &value, sizeof(value));
  }
  file.write(data, kDataBytes);
  if (!file.good()) std::abort();
}

// 2^e and the factor give nested weights their values; plain ones are FP16's nearest to those.
void check_nested(const nfp::MatrixReader& matrix) {
  const auto cols = static_cast<size_t>(matrix.cols());
  std::vector<uint8_t> upper(cols), lower(cols);
  std::vector<uint16_t> exact(cols);
  for (int64_t r = 0; r < matrix.rows(); ++r) {
    int8_t exponent = 0;
    float factor = 0;
    if (!matrix.read_nested(r, 1, upper.data(), lower.data(), &exponent).ok()) std::abort();
    if (!matrix.row_factors(r, 1, &factor).ok()) std::abort();
    if (!matrix.read_fp16(r, 1, exact.data()).ok()) continue;  // beyond FP16, which is said
    for (size_t c = 0; c < cols; ++c) {
      const float value = std::ldexp(nfp::fp16_to_fp32(nfp::join(upper[c], lower[c])), exponent) * factor;
      if (nfp::fp32_to_fp16(value) != exact[c]) std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  nfp::log::set_level(nfp::log::Level::kOff);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t line = std::min(text.find('\n'), text.size());
  write_weights(text.substr(std::min(line + 1, text.size())));
  const auto source = nfp::open_plain_directory(folder(), std::string(text.substr(0, line)));
  if (!source.ok()) return 0;
  static nfp::ThreadPool threads(1);
  for (const nfp::TensorInfo& tensor : (*source)->tensors()) {
    if (tensor.shape.rank() != 2 || tensor.shape.elements() > kMostElements) continue;
    nfp::MatrixAnalysis analysis;
    const auto matrix = (*source)->matrix(tensor.name, threads, &analysis);
    if (!matrix.ok()) continue;
    if ((*matrix)->storage() == nfp::Storage::kNested) {
      check_nested(**matrix);
    } else {
      std::vector<uint16_t> row(static_cast<size_t>((*matrix)->cols()));
      for (int64_t r = 0; r < (*matrix)->rows(); ++r) (void)(*matrix)->read_fp16(r, 1, row.data());
    }
  }
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Starts from whole checkpoints, one of each kind of scales.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  constexpr std::string_view kSeeds[] = {
      R"({"quantization_config":{"quant_method":"fp8"}})"
      "\n"
      R"({"a.weight":{"dtype":"F8_E4M3","shape":[4,8],"data_offsets":[0,32]},)"
      R"("a.weight_scale":{"dtype":"F32","shape":[],"data_offsets":[128,132]}})",
      R"({"quantization_config":{"quant_method":"fp8","weight_block_size":[2,3]}})"
      "\n"
      R"({"a.weight":{"dtype":"F8_E4M3","shape":[3,7],"data_offsets":[0,21]},)"
      R"("a.weight_scale_inv":{"dtype":"F32","shape":[2,3],"data_offsets":[128,152]}})",
      R"({"quantization_config":{"quant_method":"compressed-tensors","format":"float-quantized","config_groups":{"g":)"
      R"({"weights":{"num_bits":8,"type":"float","strategy":"channel"}}}}})"
      "\n"
      R"({"a.weight":{"dtype":"F8_E4M3","shape":[4,5],"data_offsets":[0,20]},)"
      R"("a.weight_scale":{"dtype":"BF16","shape":[4,1],"data_offsets":[130,138]},)"
      R"("b.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[138,146]}})",
      R"({"architectures":["Gemma3ForConditionalGeneration"],"text_config":{"model_type":"gemma3_text"},)"
      R"("quantization_config":{"quant_method":"fbgemm_fp8"}})"
      "\n"
      R"({"model.language_model.a.weight":{"dtype":"F8_E4M3","shape":[2,4],"data_offsets":[0,8]},)"
      R"("model.language_model.a.weight_scale":{"dtype":"F32","shape":[2,1],"data_offsets":[128,136]}})",
  };
  const std::string_view start = kSeeds[seed % std::size(kSeeds)];
  if (size >= 16 || max_size < start.size()) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, start.data(), start.size());
  return start.size();
}
