#include "model/layers/norm.h"

namespace nfp {

Status Norm::load(WeightLoader& weights, const ModelConfig& config, const std::string& name, float scale) {
  NFP_ASSIGN_OR_RETURN(weight, weights.vector(name, config.hidden, config.norm_offset, scale));
  eps = config.norm_eps;
  hidden = config.hidden;
  wide = config.wide_stream;
  return ok_status();
}

RmsNormArgs Norm::of(const Buffer& x, int32_t rows, Precision consumer, const Buffer& out, bool into_stream) const {
  return {.x = x.data(),
          .weight = weight.as<float>(),
          .eps = eps,
          .rows = rows,
          .hidden = hidden,
          .x_is_f32 = wide,
          .out_is_f32 = wide && into_stream,
          .consumer = consumer,
          .out = out.data()};
}

}  // namespace nfp
