#include "model/layers/pass.h"

#include <algorithm>
#include <utility>

namespace nfp {

size_t Workspace::stream_bytes(Backend& backend, const ModelConfig& config, int32_t rows) {
  if (!config.wide_stream) return backend.activation_bytes(rows, config.hidden);
  return static_cast<size_t>(rows) * static_cast<size_t>(config.hidden) * sizeof(float);
}

Status Workspace::reserve(Backend& backend, const ModelConfig& config, int32_t tokens, int32_t sequences) {
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
  const int64_t qkv_features = config.query_features() + 2 * config.kv_features();
  NFP_RETURN_IF_ERROR(make(qkv, qkv_features));
  NFP_RETURN_IF_ERROR(make_bytes(last_qkv, backend.activation_bytes(std::min(tokens, sequences), qkv_features)));
  NFP_RETURN_IF_ERROR(make(attended, config.query_features()));
  NFP_RETURN_IF_ERROR(make(mlp, std::max(config.intermediate, config.experts.shared_intermediate)));
  if (config.experts.count == 0) return ok_status();
  experts = config.experts.count;
  top_experts = config.experts.top;
  const auto make_words = [&](Buffer& buffer, int64_t count) -> Status {
    buffer.reset();
    NFP_ASSIGN_OR_RETURN(buffer, backend.allocate(static_cast<size_t>(count) * sizeof(int32_t)));
    return ok_status();
  };
  const int64_t assignments = int64_t{tokens} * top_experts;
  NFP_RETURN_IF_ERROR(make_words(route_start, experts + 1));
  NFP_RETURN_IF_ERROR(make_words(route_row, assignments));
  NFP_RETURN_IF_ERROR(make_words(route_place, assignments));
  NFP_RETURN_IF_ERROR(make_words(route_weight, assignments));
  NFP_RETURN_IF_ERROR(make_words(router_logits, int64_t{tokens} * experts));
  NFP_RETURN_IF_ERROR(make_words(shared_weight, tokens));
  for (const auto& [buffer, features] :
       {std::pair{&expert_mlp, config.experts.intermediate}, {&expert_out, config.hidden}}) {
    buffer->reset();
    NFP_ASSIGN_OR_RETURN(*buffer, backend.allocate(backend.activation_bytes(assignments, features)));
  }
  return config.experts.shared_intermediate > 0 ? make(shared, config.hidden) : ok_status();
}

ExpertRoutes Workspace::routes() const {
  ExpertRoutes routes;
  routes.experts = experts;
  routes.top = top_experts;
  routes.start = route_start.as<int32_t>();
  routes.row = route_row.as<int32_t>();
  routes.place = route_place.as<int32_t>();
  routes.weight = route_weight.as<float>();
  return routes;
}

void Pass::narrow(int32_t hidden) {
  const size_t element = work.wide ? sizeof(float) : size_of(backend.activation_dtype());
  const size_t bytes = static_cast<size_t>(batch.sequences) * static_cast<size_t>(hidden) * element;
  backend.gather_rows(
      {work.residual.data(), batch.last.token, batch.sequences, hidden, work.product.data(), work.wide});
  backend.copy({.dst = work.residual.data(), .src = work.product.data(), .bytes = bytes});
  batch = nfp::narrow(batch);
}

bool Pass::multiply(const Linear& linear, const Buffer& x, const Buffer& y, LinearArgs call) const {
  if (args.observer != nullptr) args.observer->on_linear(linear, x.data(), rows());
  if (args.until == &linear) return false;
  call.weight = linear.weight.get();
  call.x = x.data();
  call.x_is_plain = call.x_is_plain || &x == &work.residual;
  call.rows = rows();
  call.precision = linear.at(args.precision, args.fp8_share);
  call.y = y.data();
  call.stage = linear.stage();
  backend.linear(call);
  return true;
}

}  // namespace nfp
