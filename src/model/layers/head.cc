#include "model/layers/head.h"

#include "model/layers/pass.h"

namespace nfp {

Status Head::load(WeightLoader& weights, const ModelConfig& config) {
  NFP_RETURN_IF_ERROR(norm.load(weights, config, std::string(kFinalNormName)));
  if (config.logit_scale != 1.0f) {
    NFP_RETURN_IF_ERROR(scaled_norm.emplace().load(weights, config, std::string(kFinalNormName), config.logit_scale));
  }
  soft_cap = config.logit_cap;
  if (config.tied_embeddings) return ok_status();
  NFP_ASSIGN_OR_RETURN(own, weights.linear(GemmType::kHead, config.layers, {std::string(kHeadName)}, config.vocab,
                                           config.hidden, false));
  return ok_status();
}

Status Head::reserve(Backend& backend, const ModelConfig& config, int32_t rows) {
  gathered.reset();
  normed.reset();
  NFP_ASSIGN_OR_RETURN(gathered, backend.allocate(Workspace::stream_bytes(backend, config, rows)));
  NFP_ASSIGN_OR_RETURN(normed, backend.allocate(backend.activation_bytes(rows, config.hidden)));
  return ok_status();
}

const Buffer& Head::states(Backend& backend, const Buffer& hidden, const int32_t* rows, int32_t count,
                           Precision consumer) const {
  return normalise(norm, backend, hidden, rows, count, consumer);
}

const Buffer& Head::normalise(const Norm& by, Backend& backend, const Buffer& hidden, const int32_t* rows,
                              int32_t count, Precision consumer) const {
  if (rows != nullptr) backend.gather_rows({hidden.data(), rows, count, by.hidden, gathered.data(), by.wide});
  backend.rms_norm(by.of(rows != nullptr ? gathered : hidden, count, consumer, normed));
  return normed;
}

LinearArgs Head::product(Backend& backend, const Linear& matrix, const Buffer& hidden, const int32_t* rows,
                         int32_t count, Precision precision, float* logits) const {
  LinearArgs call;
  call.weight = matrix.weight.get();
  const Precision consumer = matrix.weight->consumes(matrix.at(precision));
  call.x = normalise(scaled_norm.has_value() ? *scaled_norm : norm, backend, hidden, rows, count, consumer).data();
  call.rows = count;
  call.precision = matrix.at(precision);
  call.y = logits;
  call.y_is_f32 = true;
  call.soft_cap = soft_cap;
  call.stage = matrix.stage();
  return call;
}

}  // namespace nfp
