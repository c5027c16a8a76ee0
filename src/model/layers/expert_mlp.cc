#include "model/layers/expert_mlp.h"

namespace nfp {
namespace {

constexpr float kLargestFp16 = 65504.0f;

std::byte* row_of(const Backend& backend, const Buffer& buffer, int64_t row, int64_t features) {
  return buffer.as<std::byte>() + static_cast<size_t>(row * features) * size_of(backend.activation_dtype());
}

}  // namespace

Status ExpertMlp::load(WeightLoader& weights, const ModelConfig& config, int32_t layer) {
  const Family& family = *config.family;
  const Experts& experts = config.experts;
  hidden = config.hidden;
  wide = experts.intermediate;
  renormalise = experts.renormalise;
  activation = config.activation;
  has_shared = experts.shared_intermediate > 0;
  // A GPU multiplies its numbers, and the gate's, as two of FP16 each.
  NFP_ASSIGN_OR_RETURN(router, weights.vector(family.name(TensorRole::kRouter, layer),
                                              int64_t{experts.count} * config.hidden, 0.0f, 1.0f, kLargestFp16));
  const auto count = static_cast<size_t>(experts.count);
  gate_up.resize(count);
  down.resize(count);
  gate_up_weights.resize(count);
  down_weights.resize(count);
  for (size_t e = 0; e < count; ++e) {
    const auto expert = static_cast<int32_t>(e);
    NFP_ASSIGN_OR_RETURN(
        gate_up[e],
        weights.linear(GemmType::kGateUp, layer, family.names(GemmType::kGateUp, layer, Block::kExpert, expert),
                       2 * int64_t{wide}, config.hidden, config.mlp_bias, RowOrder::kInterleave));
    NFP_ASSIGN_OR_RETURN(
        down[e], weights.linear(GemmType::kDown, layer, family.names(GemmType::kDown, layer, Block::kExpert, expert),
                                config.hidden, wide, config.mlp_bias));
    gate_up[e].expert = down[e].expert = expert;
    gate_up_weights[e] = gate_up[e].weight.get();
    down_weights[e] = down[e].weight.get();
  }
  if (!has_shared) return ok_status();
  NFP_ASSIGN_OR_RETURN(shared_gate, weights.vector(family.name(TensorRole::kSharedRouter, layer), config.hidden, 0.0f,
                                                   1.0f, kLargestFp16));
  return shared.load(weights, config, layer, Block::kShared);
}

bool ExpertMlp::run(const Pass& pass, std::optional<CombineExpertsArgs>& sum) const {
  const Workspace& work = pass.work;
  RouteArgs choose;
  choose.x = work.normed.data();
  choose.router = router.as<float>();
  choose.shared_gate = shared_gate.as<float>();
  choose.rows = pass.rows();
  choose.hidden = hidden;
  choose.renormalise = renormalise;
  choose.routes = work.routes();
  choose.logits = work.router_logits.as<float>();
  choose.shared_weight = work.shared_weight.as<float>();
  if (pass.args.observer == nullptr) choose.gathered = work.expert_out.data();
  pass.backend.route(choose);
  if (!(pass.args.observer != nullptr ? run_observed(pass) : run_experts(pass))) return false;
  if (has_shared && !shared.run(pass, work.normed, work.shared)) return false;
  sum = {.x = work.expert_out.data(),
         .routes = choose.routes,
         .rows = pass.rows(),
         .hidden = hidden,
         .shared = has_shared ? work.shared.data() : nullptr,
         .shared_weight = choose.shared_weight,
         .out = work.product.data(),
         .follows = !has_shared && pass.args.observer == nullptr};
  return true;
}

bool ExpertMlp::run_experts(const Pass& pass) const {
  const Workspace& work = pass.work;
  ExpertLinearArgs call;
  call.routes = work.routes();
  call.rows = pass.rows();
  call.precision = pass.args.precision;
  call.activation = activation;
  const auto multiply = [&](const std::vector<Linear>& linears, const std::vector<const LinearWeight*>& weights,
                            const Buffer& x, const Buffer& y) {
    call.weights = weights.data();
    call.stage = linears.front().stage();
    call.exact = {};
    for (size_t e = 0; e < linears.size() && !is_exact(call.precision); ++e) {
      const bool exact = is_exact(linears[e].at(pass.args.precision, pass.args.fp8_share));
      call.exact[e / 64] |= uint64_t{exact} << (e % 64);
    }
    call.x = x.data();
    call.y = y.data();
    pass.backend.expert_linear(call);
  };
  call.epilogue = Epilogue::kGatedActivation;
  call.gathered = work.expert_out.data();  // as in run(); it is written only afterwards
  multiply(gate_up, gate_up_weights, work.normed, work.expert_mlp);
  call.gathered = nullptr;
  call.epilogue = Epilogue::kStore;
  call.sorted = true;
  call.follows = true;
  multiply(down, down_weights, work.expert_mlp, work.expert_out);
  return true;
}

// An observer is told of each expert's rows, so they are gathered, and the experts multiply them one by one: the
// results are the same bits.
bool ExpertMlp::run_observed(const Pass& pass) const {
  const Workspace& work = pass.work;
  Backend& backend = pass.backend;
  const ExpertRoutes routes = work.routes();
  std::vector<int32_t> start(gate_up.size() + 1);
  if (const Status read = backend.download(start.data(), routes.start, start.size() * sizeof(int32_t)); !read.ok()) {
    pass.args.observer->on_error(read.error());
    return false;
  }
  backend.gather_rows({work.normed.data(), routes.row, start.back(), hidden, work.expert_out.data()});
  if (!observe(pass, gate_up, start, work.expert_out, hidden)) return false;
  const auto multiply = [&](const std::vector<Linear>& linears, const Buffer& x, int64_t k, const Buffer& y, int64_t n,
                            Epilogue epilogue) {
    for (size_t e = 0; e < linears.size(); ++e) {
      LinearArgs call;
      call.rows = start[e + 1] - start[e];
      if (call.rows == 0) continue;
      call.weight = linears[e].weight.get();
      call.x = row_of(backend, x, start[e], k);
      call.precision = linears[e].at(pass.args.precision, pass.args.fp8_share);
      call.epilogue = epilogue;
      call.activation = activation;
      call.y = row_of(backend, y, start[e], n);
      call.stage = linears[e].stage();
      backend.linear(call);
    }
  };
  multiply(gate_up, work.expert_out, hidden, work.expert_mlp, wide, Epilogue::kGatedActivation);
  if (!observe(pass, down, start, work.expert_mlp, wide)) return false;
  multiply(down, work.expert_mlp, wide, work.expert_out, hidden, Epilogue::kStore);
  return true;
}

// False where the forward ends before one of these.
bool ExpertMlp::observe(const Pass& pass, const std::vector<Linear>& linears, const std::vector<int32_t>& start,
                        const Buffer& x, int64_t cols) const {
  bool goes_on = true;
  for (size_t e = 0; e < linears.size(); ++e) {
    const int32_t rows = start[e + 1] - start[e];
    if (rows > 0) pass.args.observer->on_linear(linears[e], row_of(pass.backend, x, start[e], cols), rows);
    goes_on = goes_on && pass.args.until != &linears[e];
  }
  return goes_on;
}

}  // namespace nfp
