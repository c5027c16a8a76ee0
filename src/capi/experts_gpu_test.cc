// A mixture's experts through the C interface, against float64. Needs a Hopper GPU; skips elsewhere.
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include "backend/cuda/gemm/plan/layout.h"
#include "capi/testing/gpu.h"

namespace nfp::cuda {
namespace {

struct ExpertsDeleter {
  void operator()(nfp_experts* experts) const { nfp_experts_destroy(experts); }
};

struct Case {
  int64_t rows;
  int32_t experts, top, local;  // `local` of the experts are here, the first ones
  int64_t hidden, intermediate;
  nfp_type type;
  nfp_activation activation;
};

class CApiExperts : public CApiGpuTest {
 protected:
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  float normal(float sigma) { return std::normal_distribution<float>(0.0f, sigma)(random_); }

  std::mt19937 random_{11};
};

TEST_F(CApiExperts, ReadsChoicesOfKernelsForThisGpuAlone) {
  const std::string file = ::testing::TempDir() + "/choices.json";
  const auto write = [&](const std::string& device) {
    std::ofstream(file) << R"({"format": "nestedfp gemm choices 1", "device": ")" << device << R"(", "choices": [)"
                        << R"({"n": 4096, "k": 4096, "mode": "f16", "by_tokens": {"1": "128x16 c1 b1 split3"}}]})";
  };
  EXPECT_NE(nfp_gpu_read_choices(gpu_.get(), "/nowhere.json"), NFP_OK);
  write("another GPU");
  EXPECT_EQ(nfp_gpu_read_choices(gpu_.get(), file.c_str()), NFP_INVALID_INPUT);
  EXPECT_NE(std::string(nfp_last_error()).find("another GPU"), std::string::npos) << nfp_last_error();
  write(nfp_gpu_name(gpu_.get()));
  EXPECT_EQ(nfp_gpu_read_choices(gpu_.get(), file.c_str()), NFP_OK) << nfp_last_error();
  const DeviceVector<uint8_t> plane(nfp_plane_bytes(4096, 4096)), workspace(nfp_gpu_workspace_bytes());
  const nfp_weight weight = {sizeof(weight), plane.get(), plane.get(), nullptr, 4096, 4096, NFP_JOIN_BIASED};
  nfp_linear* linear = nullptr;
  ASSERT_EQ(nfp_linear_create(gpu_.get(), &weight, workspace.get(), nfp_gpu_workspace_bytes(), &linear), NFP_OK)
      << nfp_last_error();
  char text[300];
  EXPECT_EQ(nfp_linear_describe(linear, NFP_PRECISION_FP16, NFP_F16, 1, text, sizeof(text)), NFP_OK);
  EXPECT_NE(std::string(text).find("128x16 c1 b1 split3 (tuned)"), std::string::npos) << text;
  EXPECT_EQ(nfp_linear_describe(linear, NFP_PRECISION_FP16, NFP_F16, 8, text, sizeof(text)), NFP_OK);
  EXPECT_EQ(std::string(text).find("(analytic)"), std::string::npos) << text;  // the built-in choices go on
  nfp_linear_destroy(linear);
}

// The experts' matrices W[n, k] on the device, and what each precision multiplies with.
class Stack {
 public:
  template <typename Draw>
  Stack(nfp_gpu* gpu, int32_t experts, int64_t n, int64_t k, nfp_type type, int32_t dense_expert, const Draw& draw)
      : n_(static_cast<size_t>(n)),
        k_(static_cast<size_t>(k)),
        bytes_(nfp_expert_bytes(n, k) * static_cast<size_t>(experts)),
        scale_(static_cast<size_t>(experts) * n_),
        dense_(static_cast<size_t>(experts)) {
    const DeviceVector<nfp_gpu_report> report(1);
    for (int32_t e = 0; e < experts; ++e) {
      std::vector<uint16_t> weights(n_ * k_);
      for (size_t i = 0; i < weights.size(); ++i) {
        const float v = draw() * (i / k_ % 7 == 2 ? 64.0f : 1.0f);  // rows with an exponent
        // Nesting rounds BF16's smallest numbers, and FP16's where a row has an exponent.
        weights[i] = narrow(type, std::abs(v) < 0x1p-8f ? 0.0f : v);
      }
      const DeviceVector<uint16_t> d_weights(weights);
      uint8_t* slot = bytes_.get() + static_cast<size_t>(e) * nfp_expert_bytes(n, k);
      float* scale = scale_.get() + static_cast<size_t>(e) * n_;
      const bool dense = e == dense_expert;
      dense_[static_cast<size_t>(e)] = dense;
      std::vector<float> scales(n_, 1.0f);
      if (dense) {
        EXPECT_EQ(cudaMemcpy(slot, weights.data(), weights.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(scale, scales.data(), n_ * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
      } else {
        EXPECT_EQ(nfp_gpu_nest(gpu, d_weights.get(), k, n, k, type, NFP_JOIN_BIASED, slot, slot + nfp_plane_bytes(n, k),
                               scale, report.get(), nullptr),
                  NFP_OK)
            << nfp_last_error();
        const nfp_gpu_report found = report.host()[0];
        EXPECT_EQ(found.bad_rows, 0);
        if (type == NFP_BF16) {
          EXPECT_EQ(found.inexact_bf16, 0);
        }
        EXPECT_EQ(cudaMemcpy(scales.data(), scale, n_ * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
      }
      for (size_t i = 0; i < weights.size(); ++i) {
        const float v = widen(type, weights[i]), s = scales[i / k_];
        exact_.push_back(v);
        upper_.push_back(dense ? v : e4m3_to_fp32(fp32_to_e4m3(v / s * 256.0f)) / 256.0f * s);
      }
    }
  }
  nfp_expert_stack described() const {
    return {sizeof(nfp_expert_stack), bytes_.get(),   scale_.get(), dense_.data(), static_cast<int64_t>(n_),
            static_cast<int64_t>(k_), NFP_JOIN_BIASED};
  }
  // Row i of an expert's matrix.
  const float* row(nfp_precision precision, size_t expert, size_t i) const {
    return (precision == NFP_PRECISION_FP16 ? exact_ : upper_).data() + (expert * n_ + i) * k_;
  }

 private:
  size_t n_, k_;
  DeviceVector<uint8_t> bytes_;
  DeviceVector<float> scale_;
  std::vector<uint8_t> dense_;
  std::vector<float> exact_, upper_;
};

struct Sum {
  double value = 0, magnitude = 0, weights = 0;
};
template <typename X>
Sum dot(const float* w, const X* x, size_t k) {
  Sum sum;
  for (size_t j = 0; j < k; ++j) {
    sum.value += double{w[j]} * double{x[j]};
    sum.magnitude += std::abs(double{w[j]} * double{x[j]});
    sum.weights += std::abs(double{w[j]});
  }
  return sum;
}

TEST_F(CApiExperts, SumsAreThoseOfFloat64) {
  int rounds = 0;
  for (const Case& c :
       {Case{1, 4, 2, 4, 64, 64, NFP_F16, NFP_SILU}, Case{37, 60, 4, 60, 72, 40, NFP_BF16, NFP_SILU},
        Case{90, 8, 3, 5, 136, 96, NFP_F16, NFP_GELU_TANH}, Case{25, 130, 8, 70, 64, 24, NFP_F16, NFP_SILU},
        Case{70, 2, 2, 1, 64, 8, NFP_BF16, NFP_GELU_TANH}, Case{300, 4, 2, 2, 200, 136, NFP_F16, NFP_SILU},
        Case{70, 2, 1, 2, 72, 72, NFP_F16, NFP_SILU}, Case{9, 6, 2, 2, 264, 72, NFP_BF16, NFP_SILU}}) {
    const auto rows = static_cast<size_t>(c.rows), top = static_cast<size_t>(c.top),
               hidden = static_cast<size_t>(c.hidden), inter = static_cast<size_t>(c.intermediate);
    const auto draw = [&] { return normal(0.05f); };
    const int32_t dense = c.local > 2 ? 1 : -1;
    const Stack gate_up(gpu_.get(), c.local, 2 * c.intermediate, c.hidden, c.type, dense, draw);
    const Stack down(gpu_.get(), c.local, c.hidden, c.intermediate, c.type, -1, draw);
    const nfp_expert_stack gate_up_stack = gate_up.described(), down_stack = down.described();
    nfp_experts* made = nullptr;
    ASSERT_EQ(nfp_experts_create(gpu_.get(), c.local, &gate_up_stack, &down_stack, c.activation, &made), NFP_OK)
        << nfp_last_error();
    const std::unique_ptr<nfp_experts, ExpertsDeleter> experts(made);

    std::vector<uint16_t> x_bits(rows * hidden);
    std::vector<float> x(rows * hidden), weights(rows * top);
    for (size_t i = 0; i < x.size(); ++i) x[i] = widen(c.type, x_bits[i] = narrow(c.type, normal(1.0f)));
    for (float& w : weights) w = std::abs(normal(0.4f));
    // Ids are shuffled by a map where not all experts are here; some name none.
    std::vector<int32_t> order(static_cast<size_t>(c.experts)), map(order.size()), ids(rows * top);
    std::iota(order.begin(), order.end(), 0);
    if (c.local < c.experts) std::shuffle(order.begin(), order.end(), random_);
    for (size_t e = 0; e < order.size(); ++e) {
      map[static_cast<size_t>(order[e])] = static_cast<int32_t>(e) < c.local ? static_cast<int32_t>(e) : -1;
    }
    for (size_t r = 0; r < rows; ++r) {
      std::shuffle(order.begin(), order.end(), random_);
      for (size_t t = 0; t < top; ++t)
        ids[r * top + t] = r % 11 == 5 && t == 1 ? (r % 2 == 0 ? -1 : c.experts) : order[t];
    }
    const DeviceVector<uint16_t> d_x(x_bits), y(rows * hidden);
    const DeviceVector<int32_t> d_ids(ids), d_map(map);
    const DeviceVector<float> d_weights(weights);
    const size_t scratch_bytes = nfp_experts_scratch_bytes(experts.get(), c.rows, c.top);
    const DeviceVector<uint8_t> scratch(scratch_bytes);
    for (const nfp_precision precision : {NFP_PRECISION_FP16, NFP_PRECISION_FP8}) {
      const bool mapped = c.local < c.experts;
      const nfp_experts_call call{sizeof(nfp_experts_call),
                                  precision,
                                  c.type,
                                  c.rows,
                                  c.top,
                                  d_x.get(),
                                  d_ids.get(),
                                  d_weights.get(),
                                  mapped ? d_map.get() : nullptr,
                                  mapped ? c.experts : 0,
                                  y.get(),
                                  scratch.get(),
                                  scratch_bytes};
      ASSERT_EQ(nfp_experts_run(experts.get(), &call, nullptr), NFP_OK) << nfp_last_error();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const auto got = y.host();
      // A tensor core's sums lose up to two bits of FP32 with every 16 of k; results are rounded to `type`.
      const double half = c.type == NFP_BF16 ? 0x1p-8 : 0x1p-11;
      const int64_t steps13 = hidden / 16 + 1, steps2 = inter / 16 + 1;
      const double slack13 = static_cast<double>(steps13) * 0x1p-22, slack2 = static_cast<double>(steps2) * 0x1p-22;
      // E4M3 activations: half of a step is a 16th of a number, or, of small ones, of 2^-9 of a scale.
      const bool rounded =
          precision == NFP_PRECISION_FP8 && dense < 0 && int64_t{c.rows} * c.top >= int64_t{32} * c.local;
      rounds += rounded;
      const double step = rounded ? 1.001 * 0x1p-4 : 0.0, least = rounded ? 1.001 * 0x1p-10 / 448 : 0.0;
      for (size_t r = 0; r < rows; ++r) {
        std::vector<double> want(hidden), bound(hidden);
        double x_most = 0;
        for (size_t i = 0; i < hidden; ++i) x_most = std::max(x_most, std::abs(double{x[r * hidden + i]}));
        for (size_t t = 0; t < top; ++t) {
          const int32_t id = ids[r * top + t];
          const int32_t local = id < 0 || id >= c.experts ? -1 : mapped ? map[static_cast<size_t>(id)] : id;
          if (local < 0) continue;
          const auto e = static_cast<size_t>(local);
          std::vector<double> h(inter), h_bound(inter);
          double h_most = 0;
          for (size_t i = 0; i < inter; ++i) {
            const auto at = static_cast<size_t>(swiglu_gate_row(static_cast<int64_t>(i)));
            const Sum gate = dot(gate_up.row(precision, e, at), x.data() + r * hidden, hidden);
            const Sum up = dot(gate_up.row(precision, e, at + 8), x.data() + r * hidden, hidden);
            const double g = gate.value, cubic = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
            const double activated = c.activation == NFP_SILU ? g / (1 + std::exp(-g)) : g * (1 + std::tanh(cubic)) / 2;
            h[i] = activated * up.value;
            const double gate_off = gate.magnitude * (slack13 + step) + gate.weights * x_most * least;
            const double up_off = up.magnitude * (slack13 + step) + up.weights * x_most * least;
            h_bound[i] = 1.13 * gate_off * (std::abs(up.value) + up_off) + std::abs(g) * up_off +
                         std::abs(h[i]) * (half + 1e-5) + 0x1p-25;
            h_most = std::max(h_most, std::abs(h[i]) + h_bound[i]);
          }
          for (size_t i = 0; i < inter; ++i) h_bound[i] += (std::abs(h[i]) + h_bound[i]) * step + h_most * least;
          const double weight = weights[r * top + t];
          for (size_t i = 0; i < hidden; ++i) {
            const float* w = down.row(precision, e, i);
            const Sum sum = dot(w, h.data(), inter);
            const Sum off = dot(w, h_bound.data(), inter);
            want[i] += weight * sum.value;
            const double product_off = sum.magnitude * slack2 + off.magnitude;
            bound[i] += weight * (product_off + (std::abs(sum.value) + product_off) * half + 0x1p-25) +
                        std::abs(weight * sum.value) * 8 * 0x1p-24;
          }
        }
        for (size_t i = 0; i < hidden; ++i) {
          const double value = widen(c.type, got[r * hidden + i]);
          ASSERT_LE(std::abs(value - want[i]), bound[i] + (std::abs(want[i]) + bound[i]) * half + 0x1p-25)
              << "rows " << rows << ", experts " << c.experts << ", precision " << precision << ", row " << r
              << ", feature " << i;
        }
      }
    }
  }
  EXPECT_EQ(rounds, 3);
}

TEST_F(CApiExperts, GraphsReplayWithOtherRoutes) {
  const int64_t rows = 40, hidden = 64, inter = 64;
  const int32_t experts = 6, top = 2;
  const auto draw = [&] { return normal(0.05f); };
  const Stack gate_up(gpu_.get(), experts, 2 * inter, hidden, NFP_F16, -1, draw);
  const Stack down(gpu_.get(), experts, hidden, inter, NFP_F16, -1, draw);
  const nfp_expert_stack gate_up_stack = gate_up.described(), down_stack = down.described();
  nfp_experts* made = nullptr;
  ASSERT_EQ(nfp_experts_create(gpu_.get(), experts, &gate_up_stack, &down_stack, NFP_SILU, &made), NFP_OK);
  const std::unique_ptr<nfp_experts, ExpertsDeleter> layer(made);
  std::vector<uint16_t> x(rows * hidden);
  for (uint16_t& v : x) v = fp32_to_fp16(normal(1.0f));
  const DeviceVector<uint16_t> d_x(x), y(x.size());
  const DeviceVector<float> weights(std::vector<float>(rows * top, 0.5f));
  const DeviceVector<int32_t> ids(std::vector<int32_t>(rows * top, 0));
  const size_t bytes = nfp_experts_scratch_bytes(layer.get(), rows, top);
  const DeviceVector<uint8_t> scratch(bytes);
  const nfp_experts_call call{sizeof(nfp_experts_call),
                              NFP_PRECISION_FP16,
                              NFP_F16,
                              rows,
                              top,
                              d_x.get(),
                              ids.get(),
                              weights.get(),
                              nullptr,
                              0,
                              y.get(),
                              scratch.get(),
                              bytes};
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(nfp_experts_run(layer.get(), &call, stream), NFP_OK) << nfp_last_error();
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int round = 0; round < 4; ++round) {
    std::vector<int32_t> routes(rows * top);
    for (int32_t& id : routes) id = round == 0 ? experts - 1 : integer(0, round);
    ASSERT_EQ(cudaMemcpy(ids.get(), routes.data(), routes.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const auto replayed = y.host();
    ASSERT_EQ(nfp_experts_run(layer.get(), &call, stream), NFP_OK);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(replayed == y.host()) << round;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(CApiExperts, WrongArgumentsAreRefusedByName) {
  const auto draw = [&] { return normal(0.05f); };
  const Stack gate_up(gpu_.get(), 2, 32, 64, NFP_F16, -1, draw), down(gpu_.get(), 2, 64, 16, NFP_F16, -1, draw);
  nfp_expert_stack a = gate_up.described(), b = down.described();
  nfp_experts* made = nullptr;
  const auto refused = [&](const char* what) {
    EXPECT_EQ(nfp_experts_create(gpu_.get(), 2, &a, &b, NFP_SILU, &made), NFP_USAGE);
    EXPECT_NE(std::string(nfp_last_error()).find(what), std::string::npos) << nfp_last_error();
    a = gate_up.described();
    b = down.described();
  };
  a.size = 8;
  refused("sizeof(nfp_expert_stack)");
  b.k = 12;
  refused("multiples of 8");
  b.n = 72;
  refused("[2 * intermediate, hidden]");
  a.bytes += 8;
  refused("gate_up->bytes");
  b.join = static_cast<nfp_join_kind>(2);
  refused("down->join is unknown");
  EXPECT_EQ(nfp_experts_create(gpu_.get(), 513, &a, &b, NFP_SILU, &made), NFP_USAGE);
  ASSERT_EQ(nfp_experts_create(gpu_.get(), 2, &a, &b, NFP_SILU, &made), NFP_OK);
  nfp_experts_call call{};
  EXPECT_EQ(nfp_experts_run(made, &call, nullptr), NFP_USAGE);
  call.size = sizeof(call);
  call.rows = 1;
  EXPECT_EQ(nfp_experts_run(made, &call, nullptr), NFP_USAGE);
  EXPECT_NE(std::string(nfp_last_error()).find("top"), std::string::npos);
  call.top = 1;
  const DeviceVector<uint8_t> memory(256);
  call.ids = reinterpret_cast<const int32_t*>(memory.get());
  call.weights = reinterpret_cast<const float*>(memory.get());
  for (const auto& [x, y] : {std::pair{0, 2}, std::pair{8, 0}}) {
    call.x = memory.get() + x;
    call.y = memory.get() + y;
    EXPECT_EQ(nfp_experts_run(made, &call, nullptr), NFP_USAGE);
    EXPECT_NE(std::string(nfp_last_error()).find("x and y must be 16-byte aligned"), std::string::npos)
        << nfp_last_error();
  }
  call.x = call.y = memory.get();
  for (const auto& [field, name] :
       {std::pair<void*, const char*>{&call.precision, "precision is unknown"}, {&call.type, "type is unknown"}}) {
    const int wrong = 2, right = 0;
    std::memcpy(field, &wrong, sizeof(wrong));
    EXPECT_EQ(nfp_experts_run(made, &call, nullptr), NFP_USAGE);
    EXPECT_NE(std::string(nfp_last_error()).find(name), std::string::npos) << nfp_last_error();
    std::memcpy(field, &right, sizeof(right));
  }
  EXPECT_EQ(nfp_experts_scratch_bytes(nullptr, 1, 1), 0u);
  EXPECT_GT(nfp_experts_scratch_bytes(made, 1, 2), 0u);
  EXPECT_EQ(nfp_experts_scratch_bytes(made, int64_t{1} << 62, 4), 0u);  // as many as no call takes
  nfp_experts_destroy(made);
}

}  // namespace
}  // namespace nfp::cuda
