// A model: a decoder-only transformer's forward pass over a ragged batch, on any backend.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "model/config.h"
#include "model/linear.h"
#include "nested/precision.h"

namespace nfp {

class WeightLoader;

struct ForwardArgs {
  // With batch.last the last layer computes no more than keys and values of the other tokens, and hidden states have a
  // row a sequence.
  BatchView batch;
  Precision precision = Precision::kFp16;
  KvCache* cache = nullptr;
  double fp8_share = 1.0;  // of the linear layers' weights, in an FP8 step: Linear::fp8_from says which
  // Layers to run, first .. end-1; -1 = to the last. From 0 the tokens are embedded first (alone, where end is 0);
  // from a later layer the hidden states are those in Model::hidden().
  int32_t first_layer = 0;
  int32_t end_layer = -1;
  LinearObserver* observer = nullptr;  // not of the head; null = none
  // Ends the forward before this layer multiplies, once the observer was told of its inputs: Model::hidden() is then
  // the residual stream that the layer would add to, or that its inputs are made of. Of an expert: once it was told of
  // all experts' inputs. null = goes on.
  const Linear* until = nullptr;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  virtual Backend& backend() const = 0;

  // Makes room for steps of up to `tokens` tokens, `rows` rows of logits at once, and positions below `positions` (at
  // most the configuration's max_context). Call before the first forward.
  virtual Status reserve(int32_t tokens, int32_t rows, int32_t positions) = 0;
  // Runs the layers: writes keys and values of the batch's tokens, and leaves their hidden states inside, a row a
  // token, or a sequence where the batch has `last`.
  virtual void forward(const ForwardArgs& args) = 0;
  // Logits of `count` hidden states of the last forward. rows: device [count], indices; null = the first ones; out:
  // device [count, vocab] FP32.
  virtual void logits(const int32_t* rows, int32_t count, Precision precision, float* out) = 0;
  // Tokens of args.rows hidden states likewise. logits: device, as much as logits() would write; it may hold anything
  // afterwards. args: all but the logits.
  virtual void sample(const int32_t* rows, Precision precision, float* logits, SampleArgs args) = 0;

  // `count` hidden states of the last forward (at most reserve()'s rows) as the head reads them, after the
  // final norm: [count, hidden] of the backend's activation_dtype(), until the next call of this or logits().
  virtual const Buffer& final_states(const int32_t* rows, int32_t count) = 0;

  // The residual stream [rows, hidden] that the last forward left: FP32 where config().wide_stream, else of the
  // backend's activation_dtype().
  virtual const Buffer& hidden() const = 0;

  virtual std::vector<Linear*> linears() = 0;  // in order of layers; the head (the embedding, where tied) last
  // Reads one layer's weights again, which may come through another filter (calibration goes on with what it chose).
  // Its linears() stay where they are, and are as load_model leaves them.
  virtual Status reload(int32_t layer, WeightLoader& weights) = 0;
  virtual KvCacheSpec kv_spec(int64_t blocks, int32_t block_size, DType dtype) const = 0;
  virtual size_t weight_bytes() const = 0;  // of all linear layers and embeddings, as held
};

}  // namespace nfp
