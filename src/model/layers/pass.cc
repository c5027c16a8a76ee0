#include "model/layers/pass.h"

namespace nfp {

Status Workspace::reserve(Backend& backend, const ModelConfig& config, int32_t tokens) {
  const auto make = [&](Buffer& buffer, int64_t features) -> Status {
    buffer.reset();
    NFP_ASSIGN_OR_RETURN(buffer, backend.allocate(backend.activation_bytes(tokens, features)));
    return ok_status();
  };
  NFP_RETURN_IF_ERROR(make(residual, config.hidden));
  NFP_RETURN_IF_ERROR(make(product, config.hidden));
  if (config.family->has(TensorRole::kAttentionPostNorm)) NFP_RETURN_IF_ERROR(make(added, config.hidden));
  NFP_RETURN_IF_ERROR(make(normed, config.hidden));
  NFP_RETURN_IF_ERROR(make(qkv, config.query_features() + 2 * config.kv_features()));
  NFP_RETURN_IF_ERROR(make(attended, config.query_features()));
  return make(mlp, config.intermediate);
}

bool Pass::multiply(const Linear& linear, const Buffer& x, const Buffer& y, LinearArgs call) const {
  if (args.observer != nullptr) args.observer->on_linear(linear, x.data(), rows());
  if (args.until == &linear) return false;
  call.weight = linear.weight.get();
  call.x = x.data();
  call.rows = rows();
  call.precision = linear.at(args.precision, args.fp8_share);
  call.y = y.data();
  backend.linear(call);
  return true;
}

}  // namespace nfp
