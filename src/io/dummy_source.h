// A model without weights: random ones of realistic spread, made as fast as memory is read, for measuring the speed of
// a model whose checkpoint is not at hand.
//
// A pool of 64 MB of normal FP16 numbers is made once; each row of each tensor is read from a place in it that depends
// only on the seed, the tensor's name and the row. So weights are the same from run to run and from thread to thread,
// and no two rows are alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/shape.h"
#include "io/model_source.h"

namespace nfp {

struct DummyTensor {
  enum class Kind : uint8_t {
    kWeights,  // normal, deviation kDummySigma: matrices and biases
    kOnes,     // norms
  };
  std::string name;
  Shape shape;
  Kind kind = Kind::kWeights;
};

inline constexpr float kDummySigma = 0.02f;  // Hugging Face's initializer_range; the largest |w| is 0.087

struct DummyConfig {
  std::string directory;  // where text_file() looks for what else there is (a tokenizer); often nothing
  std::string json;       // config.json
};
// `config`: the path of a config.json, or of a directory that holds one. Which tensors it implies is the caller's to
// say.
Result<DummyConfig> read_dummy_config(const std::string& config);
std::unique_ptr<ModelSource> make_dummy_source(DummyConfig config, const std::vector<DummyTensor>& tensors,
                                               uint64_t seed);

}  // namespace nfp
