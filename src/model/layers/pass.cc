#include "model/layers/pass.h"

namespace nfp {

size_t Workspace::stream_bytes(Backend& backend, const ModelConfig& config, int32_t rows) {
  if (!config.wide_stream) return backend.activation_bytes(rows, config.hidden);
  return static_cast<size_t>(rows) * static_cast<size_t>(config.hidden) * sizeof(float);
}

Status Workspace::reserve(Backend& backend, const ModelConfig& config, int32_t tokens) {
  wide = config.wide_stream;
  const auto make_bytes = [&](Buffer& buffer, size_t bytes) -> Status {
    buffer.reset();
    NFP_ASSIGN_OR_RETURN(buffer, backend.allocate(bytes));
    return ok_status();
  };
  const size_t stream = stream_bytes(backend, config, tokens);
  NFP_RETURN_IF_ERROR(make_bytes(residual, stream));
  NFP_RETURN_IF_ERROR(make_bytes(product, stream));
  if (config.family->has(TensorRole::kAttentionPostNorm)) NFP_RETURN_IF_ERROR(make_bytes(added, stream));
  const auto make = [&](Buffer& buffer, int64_t features) {
    return make_bytes(buffer, backend.activation_bytes(tokens, features));
  };
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
