// Experts' kernels against float64. Needs a Hopper GPU; skips elsewhere.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <span>

#include "backend/cuda/experts/experts.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/testing/device.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

class ExpertsGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
  float number(float sigma) { return std::normal_distribution<float>(0.0f, sigma)(random_); }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  std::vector<uint16_t> halves(size_t count, float sigma) {
    std::vector<uint16_t> out(count);
    for (uint16_t& v : out) v = fp32_to_fp16(number(sigma));
    return out;
  }
  std::mt19937 random_{5};
};

void finish(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.error().message;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// Device memory of a step's routes.
struct Routes {
  Routes(int64_t rows, int32_t experts, int32_t top)
      : start(static_cast<size_t>(experts) + 1),
        row(static_cast<size_t>(rows * top)),
        place(static_cast<size_t>(rows * top)),
        weight(static_cast<size_t>(rows * top)) {
    table = {experts, top, start.get(), row.get(), place.get(), weight.get()};
  }
  DeviceVector<int32_t> start, row, place;
  DeviceVector<float> weight;
  ExpertRoutes table;
};

TEST_F(ExpertsGpu, RoutesAreThoseOfFloat64) {
  struct Case {
    int64_t rows;
    int32_t experts, top, hidden;
    bool renormalise, gate;
  };
  for (const Case& c :
       {Case{1, 8, 2, 64, true, false},      Case{5, 60, 4, 2048, false, true},     Case{300, 128, 8, 512, true, false},
        Case{33, 512, 10, 72, true, true},   Case{7, 4, 4, 4096, false, false},     Case{1000, 3, 1, 8, true, true},
        Case{2, 64, 32, 128, false, false},  Case{16, 512, 32, 256, true, true},    Case{64, 512, 32, 256, true, true},
        Case{65, 33, 8, 1032, true, true},   Case{2000, 128, 8, 2048, true, false}, Case{777, 60, 4, 2048, false, true},
        Case{17, 128, 8, 2048, true, false}, Case{32, 60, 4, 2048, false, true},    Case{33, 128, 8, 2048, true, false},
        Case{64, 8, 2, 4096, true, false},   Case{48, 31, 4, 200, false, true},     Case{63, 127, 32, 1032, true, true},
        Case{450, 8, 2, 4096, true, false},  Case{130, 64, 8, 2048, false, false},  Case{97, 128, 8, 4096, true, false},
        Case{129, 1, 1, 520, true, false}}) {
    const auto rows = static_cast<size_t>(c.rows), experts = static_cast<size_t>(c.experts),
               top = static_cast<size_t>(c.top), hidden = static_cast<size_t>(c.hidden);
    const auto x = halves(rows * hidden, 1.0f);
    std::vector<float> router(experts * hidden), gate(hidden);
    for (float& v : router) v = number(2.0f / std::sqrt(static_cast<float>(hidden)));
    for (float& v : gate) v = number(1.0f / std::sqrt(static_cast<float>(hidden)));
    const DeviceVector<uint16_t> d_x(x);
    const DeviceVector<float> d_router(router), d_gate(gate), logits(rows * experts), shared(rows);
    const Routes routes(c.rows, c.experts, c.top);
    RouteArgs call;
    call.x = d_x.get();
    call.router = d_router.get();
    call.shared_gate = c.gate ? d_gate.get() : nullptr;
    call.rows = c.rows;
    call.hidden = c.hidden;
    call.renormalise = c.renormalise;
    call.routes = routes.table;
    call.logits = logits.get();
    call.shared_weight = shared.get();
    finish(run_route(call, nullptr));
    const auto start = routes.start.host(), row = routes.row.host(), place = routes.place.host();
    const auto weight = routes.weight.host(), shared_weight = shared.host();
    ASSERT_EQ(start[0], 0);
    ASSERT_EQ(start[experts], static_cast<int32_t>(rows * top));
    std::vector<int32_t> expert_of(rows * top, -1);
    for (size_t e = 0; e < experts; ++e) {
      ASSERT_LE(start[e], start[e + 1]);
      for (int32_t a = start[e]; a < start[e + 1]; ++a) {
        expert_of[static_cast<size_t>(a)] = static_cast<int32_t>(e);
        if (a > start[e]) {
          ASSERT_LT(row[static_cast<size_t>(a) - 1], row[static_cast<size_t>(a)]);
        }
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      std::vector<double> value(experts);
      double gate_value = 0;
      for (size_t i = 0; i < hidden; ++i) {
        const double v = fp16_to_fp32(x[r * hidden + i]);
        gate_value += v * double{gate[i]};
        for (size_t e = 0; e < experts; ++e) value[e] += v * double{router[e * hidden + i]};
      }
      if (c.gate) {
        ASSERT_NEAR(shared_weight[r], 1 / (1 + std::exp(-gate_value)), 1e-5);
      }
      std::vector<size_t> order(experts);
      std::iota(order.begin(), order.end(), size_t{0});
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return value[a] > value[b]; });
      double sum = 0, all = 0;
      bool near = false;
      for (size_t i = 0; i < experts; ++i) {
        const double p = std::exp(value[order[i]] - value[order[0]]);
        all += p;
        if (i < top) sum += p;
        if (i < top && i + 1 < experts) near = near || value[order[i]] - value[order[i + 1]] < 1e-4;
      }
      for (size_t i = 0; i < top; ++i) {
        const size_t at = r * top + i;
        const auto a = static_cast<size_t>(place[at]);
        ASSERT_LT(a, rows * top);
        ASSERT_EQ(static_cast<size_t>(row[a]), r);
        if (near) continue;  // FP32's order may be another
        ASSERT_EQ(static_cast<size_t>(expert_of[a]), order[i]) << "row " << r << ", choice " << i;
        const double want = std::exp(value[order[i]] - value[order[0]]) / (c.renormalise ? sum : all);
        ASSERT_NEAR(weight[at], want, want * 1e-4);
      }
    }
  }
}

struct Matrix {
  std::vector<uint16_t> bits;  // [n, k] what is multiplied
  std::vector<uint8_t> planes[2];
};

TEST_F(ExpertsGpu, ProductsAreThoseOfFloat64) {
  enum class Form { kBiased, kFree, kUpper, kDense, kMixed };
  struct Case {
    int64_t rows, n, k;
    int32_t experts, top;
    ExpertEpilogue epilogue;
    bool sorted;
    Form form = Form::kMixed;  // of all matrices; those of one that can be grouped are
    bool e4m3 = false;
    int32_t tile = 0;
    bool distinct = false;  // experts of one row
    bool bf16 = false;      // tokens and results; weights are BF16 numbers
  };
  std::vector<Case> cases{
      {1, 64, 64, 4, 2, ExpertEpilogue::kStore, false},    {40, 192, 200, 5, 2, ExpertEpilogue::kSwiglu, false},
      {300, 96, 2048, 3, 2, ExpertEpilogue::kStore, true}, {70, 160, 72, 130, 4, ExpertEpilogue::kGeglu, false},
      {9, 1536, 768, 8, 8, ExpertEpilogue::kSwiglu, true}, {530, 77, 136, 8, 1, ExpertEpilogue::kStore, false}};
  for (const int32_t tile : {0, 8, 16, 32, 64, 128, 160, 256}) {
    for (const Form form : {Form::kBiased, Form::kUpper}) {
      if (tile > 128 && form == Form::kUpper) continue;
      cases.push_back({1, 192, 256, 4, 2, ExpertEpilogue::kStore, false, form, false, tile});
      cases.push_back({90, 336, 200, 5, 2, ExpertEpilogue::kSwiglu, false, form, false, tile});
      cases.push_back({400, 96, 1000, 3, 2, ExpertEpilogue::kStore, true, form, false, tile});
      cases.push_back({70, 160, 72, 130, 4, ExpertEpilogue::kGeglu, true, form, false, tile});
      cases.push_back({90, 336, 200, 5, 2, ExpertEpilogue::kSwiglu, false, form, false, tile, false, true});
      cases.push_back({400, 96, 1000, 3, 2, ExpertEpilogue::kStore, true, form, false, tile, false, true});
    }
    if (tile == 0 || tile == 32 || tile == 64 || tile == 128) {
      cases.push_back({1, 192, 256, 4, 2, ExpertEpilogue::kStore, true, Form::kUpper, true, tile});
      cases.push_back({90, 336, 200, 5, 2, ExpertEpilogue::kSwiglu, true, Form::kUpper, true, tile});
      cases.push_back({400, 96, 1000, 3, 2, ExpertEpilogue::kStore, true, Form::kUpper, true, tile});
      cases.push_back({70, 160, 72, 130, 4, ExpertEpilogue::kGeglu, true, Form::kUpper, true, tile});
    }
  }
  for (const Form form : {Form::kBiased, Form::kUpper}) {
    cases.push_back({1, 176, 136, 9, 4, ExpertEpilogue::kSwiglu, false, form, false, 0, true});
  }
  cases.push_back({600, 128, 128, 512, 3, ExpertEpilogue::kStore, false, Form::kBiased});
  // Several tiles a block, of every width, one behind the other in the ring.
  cases.push_back({700, 2624, 136, 12, 2, ExpertEpilogue::kSwiglu, true, Form::kUpper, true, 128});
  cases.push_back({700, 2624, 136, 12, 2, ExpertEpilogue::kStore, false, Form::kBiased, false, 160});
  cases.push_back({700, 2624, 136, 12, 2, ExpertEpilogue::kSwiglu, false, Form::kBiased, false, 256});
  for (const Case& c : cases) {
    const auto n = static_cast<size_t>(c.n), k = static_cast<size_t>(c.k), experts = static_cast<size_t>(c.experts);
    const auto assignments = static_cast<size_t>(int64_t{c.rows} * c.top);
    // Every number of tokens an expert, none among them.
    std::vector<int32_t> start(experts + 1, 0), row(assignments), expert_of(assignments), places(assignments);
    for (int32_t& e : expert_of) e = std::min(integer(0, c.experts - 1), integer(0, c.experts - 1));
    if (c.distinct) std::iota(expert_of.begin(), expert_of.end(), c.experts - c.top);
    std::vector<size_t> order(assignments);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return expert_of[a] < expert_of[b]; });
    for (size_t a = 0; a < assignments; ++a) {
      row[a] = static_cast<int32_t>(order[a] / static_cast<size_t>(c.top));
      places[order[a]] = static_cast<int32_t>(a);
    }
    std::sort(expert_of.begin(), expert_of.end());
    for (const int32_t e : expert_of) ++start[static_cast<size_t>(e) + 1];
    std::partial_sum(start.begin(), start.end(), start.begin());
    const PlaneShape shape{c.n, c.k};
    std::vector<Matrix> matrices(experts);
    std::vector<ExpertMatrix> device(experts);
    std::vector<float> row_scale(n);
    for (float& s : row_scale) s = std::ldexp(1.0f, integer(-2, 3));
    const DeviceVector<float> d_row_scale(row_scale);
    std::vector<std::unique_ptr<DeviceVector<uint8_t>>> memory;
    std::vector<std::unique_ptr<DeviceVector<uint16_t>>> dense_memory;
    for (size_t e = 0; e < experts; ++e) {
      Matrix& m = matrices[e];
      const auto form = c.form == Form::kMixed ? static_cast<Form>(e % 4) : c.form;
      m.bits = halves(n * k, 0.05f);
      std::vector<uint8_t> upper(n * k), lower(n * k);
      for (size_t i = 0; i < n * k; ++i) {
        uint16_t& w = m.bits[i];
        if (integer(0, 9) == 0) w = static_cast<uint16_t>(integer(0, 0x3ff) | integer(0, 1) << 15);  // subnormals
        if ((w & 0x7fff) > 0x3f00) w = static_cast<uint16_t>((w & 0x8000) | 0x3f00);
        if (c.bf16) w &= 0xfff8;  // eight bits of significand at most, subnormals' too
        upper[i] = fp32_to_e4m3(fp16_to_fp32(w) * 256.0f);
        if (form == Form::kFree && (w & 0x7f) != 0 && integer(0, 1) == 0) {  // the other neighbour
          const int truncated = (w >> 7) & 0x7f;
          const int other = (upper[i] & 0x7f) == truncated ? truncated + 1 : truncated;
          if (other < 0x7f) upper[i] = static_cast<uint8_t>((upper[i] & 0x80) | other);
        }
        lower[i] = static_cast<uint8_t>(w);
        if (form == Form::kUpper) w = fp32_to_fp16(e4m3_to_fp32(upper[i]) / 256.0f);
      }
      if (form == Form::kDense) {
        dense_memory.push_back(std::make_unique<DeviceVector<uint16_t>>(m.bits));
        device[e] = {reinterpret_cast<const uint8_t*>(dense_memory.back()->get()), nullptr, nullptr, false, true};
        continue;
      }
      const Join join = form == Form::kFree ? Join::kFree : Join::kBiased;
      for (const Plane plane : {Plane::kUpper, Plane::kLower}) {
        std::vector<uint8_t> packed(shape.bytes());
        const auto& in = plane == Plane::kUpper ? upper : lower;
        for (int64_t block = 0; block < shape.row_blocks(); ++block) {
          const int64_t first = block * kBlockRows;
          pack_slab(shape, plane, join, std::span(in).subspan(static_cast<size_t>(first) * k),
                    static_cast<int>(std::min<int64_t>(kBlockRows, c.n - first)),
                    packed.data() + static_cast<size_t>(block) * shape.slab_bytes());
        }
        memory.push_back(std::make_unique<DeviceVector<uint8_t>>(packed));
      }
      device[e] = {memory[memory.size() - 2]->get(), form == Form::kUpper ? nullptr : memory.back()->get(),
                   e % 3 == 0 ? d_row_scale.get() : nullptr, join == Join::kBiased, false};
    }
    const size_t tokens = c.sorted ? assignments : static_cast<size_t>(c.rows),
                 padded = static_cast<size_t>(shape.padded_k());
    auto x = halves(tokens * k, 1.0f);
    std::vector<uint16_t> sent = x;
    for (size_t i = 0; c.bf16 && i < x.size(); ++i) {
      x[i] &= 0xfff8;
      sent[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(fp16_to_fp32(x[i])) >> 16);
    }
    std::vector<uint8_t> codes(c.e4m3 ? tokens * padded : 0);
    std::vector<float> token_scale(tokens, 1.0f);
    if (c.e4m3) {
      for (size_t t = 0; t < tokens; ++t) {
        token_scale[t] = std::ldexp(1.0f, integer(-2, 2));
        for (size_t i = 0; i < k; ++i) {
          uint16_t& v = x[t * k + i];
          const uint8_t code = fp32_to_e4m3(fp16_to_fp32(v));
          codes[t * padded + static_cast<size_t>(activation_byte(static_cast<int64_t>(i)))] = code;
          v = fp32_to_fp16(e4m3_to_fp32(code) * token_scale[t]);
        }
      }
    }
    const DeviceVector<uint8_t> d_codes(codes), gathered(assignments * padded * 2);
    const DeviceVector<float> d_token_scale(token_scale);
    const bool gated = c.epilogue != ExpertEpilogue::kStore;
    const size_t columns = gated ? n / 2 : n;
    const DeviceVector<uint16_t> d_x(sent), y(assignments * columns);
    const DeviceVector<int32_t> d_start(start), d_row(row), place(places);
    const DeviceVector<float> weight(assignments);
    ExpertLinearCall call;
    call.matrices = device.data();
    call.routes = {c.experts, c.top, d_start.get(), d_row.get(), place.get(), weight.get()};
    call.n = c.n;
    call.k = c.k;
    call.x = d_x.get();
    call.sorted = c.sorted;
    call.rows = c.rows;
    call.distinct = c.distinct;
    call.bf16 = c.bf16;
    call.epilogue = c.epilogue;
    call.y = y.get();
    call.gathered = gathered.get();
    call.tile_tokens = c.tile;
    if (c.e4m3) {
      call.e4m3 = true;
      call.x = d_codes.get();
      call.token_scale = d_token_scale.get();
    }
    finish(run_expert_linear(call, nullptr));
    const auto got = y.host();
    for (size_t a = 0; a < assignments; ++a) {
      const auto e = static_cast<size_t>(expert_of[a]);
      const uint16_t* token = x.data() + (c.sorted ? a : static_cast<size_t>(row[a])) * k;
      std::vector<double> value(n), slack(n);
      for (size_t i = 0; i < n; ++i) {
        double sum = 0, magnitude = 0;
        for (size_t j = 0; j < k; ++j) {
          const double product = double{fp16_to_fp32(matrices[e].bits[i * k + j])} * double{fp16_to_fp32(token[j])};
          sum += product;
          magnitude += std::abs(product);
        }
        const double scale = device[e].row_scale != nullptr ? row_scale[i] : 1.0f;
        value[i] = sum * scale;
        // A tensor core's sums lose up to two bits of FP32 with every 16 of k.
        // (Of E4M3 numbers' those of 32 lose all below the largest one's 13th.)
        const size_t sums = c.e4m3 ? k / 32 + 2 : k / 16 + 1;
        slack[i] = magnitude * scale * static_cast<double>(sums) * (c.e4m3 ? 0x1p-13 : 0x1p-22);
      }
      for (size_t i = 0; i < columns; ++i) {
        double want = value[i], bound = slack[i];
        if (gated) {
          const auto gate_row = static_cast<size_t>(swiglu_gate_row(static_cast<int64_t>(i)));
          const double gate = value[gate_row], up = value[gate_row + 8];
          const double cubic = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
          want = (c.epilogue == ExpertEpilogue::kSwiglu ? gate / (1 + std::exp(-gate))
                                                        : gate * (1 + std::tanh(cubic)) / 2) *
                 up;
          bound = 1.13 * slack[gate_row] * (std::abs(up) + slack[gate_row + 8]) + std::abs(gate) * slack[gate_row + 8] +
                  std::abs(want) * 1e-5;
        }
        bound += std::abs(want) * (c.bf16 ? 0x1p-8 : 0x1p-11) + 0x1p-25;
        const uint16_t bits = got[a * columns + i];
        const float value_got = c.bf16 ? std::bit_cast<float>(uint32_t{bits} << 16) : fp16_to_fp32(bits);
        ASSERT_LE(std::abs(double{value_got} - want), bound)
            << "n " << n << ", k " << k << ", expert " << e << " of " << start[e + 1] - start[e] << ", assignment " << a
            << ", feature " << i << ", form " << static_cast<int>(c.form)
            << (c.e4m3   ? ", E4M3"
                : c.bf16 ? ", BF16"
                         : "")
            << ", tile of " << c.tile;
      }
    }
  }
}

TEST_F(ExpertsGpu, AssignsGivenIds) {
  struct Case {
    int32_t rows, top, stride, experts, map;  // map: ids that it has, 0 = none
  };
  for (const Case& c :
       {Case{1, 2, 2, 4, 0}, Case{40, 3, 5, 7, 0}, Case{128, 8, 128, 128, 0}, Case{32, 32, 32, 512, 0},
        Case{129, 8, 8, 128, 0}, Case{90, 11, 13, 300, 400}, Case{1, 1, 1, 1, 0}, Case{700, 8, 8, 128, 0},
        Case{5000, 8, 128, 128, 0}, Case{513, 4, 4, 6, 20}, Case{20000, 6, 6, 12, 64}, Case{3000, 32, 32, 512, 600}}) {
    std::vector<int32_t> ids(static_cast<size_t>(c.rows * c.stride), 1 << 30), map(static_cast<size_t>(c.map));
    // Some ids that there are none of; an expert twice in a row now and then.
    for (int32_t& id : ids) id = integer(-1, std::max(c.experts, c.map) + 1);
    for (int32_t& to : map) to = integer(0, 2) == 0 ? -1 : integer(0, c.experts - 1);
    const size_t assignments = static_cast<size_t>(int64_t{c.rows} * c.top);
    const DeviceVector<int32_t> d_ids(ids), d_map(map), start(static_cast<size_t>(c.experts + 1)), row(assignments),
        place(assignments);
    const DeviceVector<float> weight(assignments);
    AssignArgs call;
    call.ids = d_ids.get();
    call.id_stride = c.stride;
    call.map = c.map > 0 ? d_map.get() : nullptr;
    call.map_size = c.map;
    call.rows = c.rows;
    call.routes = {c.experts, c.top, start.get(), row.get(), place.get(), weight.get()};
    // Rows too, where there are few.
    const auto width = static_cast<size_t>(integer(1, 700)) * 8;
    const bool gathers = static_cast<int64_t>(assignments) <= kPlacedAtOnce;
    const std::vector<uint16_t> x = halves(gathers ? static_cast<size_t>(c.rows) * width : 0, 1.0f);
    const DeviceVector<uint16_t> d_x(x), gathered(gathers ? assignments * width : 0);
    if (gathers) {
      call.x = d_x.get();
      call.gathered = gathered.get();
      call.row_bytes = static_cast<int64_t>(width * 2);
    }
    finish(run_assign(call, nullptr));
    const auto got_rows = gathered.host();
    std::vector<std::vector<std::pair<int32_t, size_t>>> of_expert(static_cast<size_t>(c.experts));
    std::vector<int32_t> want_place(assignments, -1);
    for (int32_t r = 0; r < c.rows; ++r) {
      for (int32_t t = 0; t < c.top; ++t) {
        int32_t e = ids[static_cast<size_t>(int64_t{r} * c.stride + t)];
        if (c.map > 0) e = e >= 0 && e < c.map ? map[static_cast<size_t>(e)] : -1;
        if (e < 0 || e >= c.experts) continue;
        of_expert[static_cast<size_t>(e)].emplace_back(r, static_cast<size_t>(r * c.top + t));
      }
    }
    const auto got_start = start.host(), got_row = row.host();
    int32_t at = 0;
    for (size_t e = 0; e < of_expert.size(); ++e) {
      ASSERT_EQ(got_start[e], at) << c.rows << " rows, expert " << e;
      for (const auto& [r, index] : of_expert[e]) {
        ASSERT_EQ(got_row[static_cast<size_t>(at)], r) << c.rows << " rows, assignment " << at;
        if (gathers) {
          ASSERT_TRUE(std::equal(x.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(r) * width),
                                 x.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(r + 1) * width),
                                 got_rows.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(at) * width)))
              << c.rows << " rows, assignment " << at;
        }
        want_place[index] = at++;
      }
    }
    EXPECT_EQ(got_start.back(), at);
    EXPECT_TRUE(place.host() == want_place) << c.rows << " rows";
  }
}

// Of equals the first, in every kernel that chooses.
TEST_F(ExpertsGpu, TiesGoToTheFirst) {
  constexpr int32_t kExperts = 96, kTop = 6, kHidden = 1024;
  std::vector<float> router(size_t{kExperts} * kHidden);
  for (float& v : router) v = number(0.05f);
  // Experts e, e + 32 and e + 64 are the same.
  for (size_t i = router.size() / 3; i < router.size(); ++i) router[i] = router[i - router.size() / 3];
  const DeviceVector<float> d_router(router);
  for (const int32_t rows : {1, 16, 17, 32, 64, 65, 300, 1500}) {
    for (const bool batch_invariant : {false, true}) {
      const auto assignments = static_cast<size_t>(int64_t{rows} * kTop);
      const DeviceVector<uint16_t> x(halves(static_cast<size_t>(rows) * kHidden, 1.0f));
      const DeviceVector<float> logits(static_cast<size_t>(rows * kExperts)), shared(1);
      const Routes routes(rows, kExperts, kTop);
      RouteArgs call;
      call.x = x.get();
      call.router = d_router.get();
      call.rows = rows;
      call.hidden = kHidden;
      call.batch_invariant = batch_invariant;
      call.routes = routes.table;
      call.logits = logits.get();
      finish(run_route(call, nullptr));
      const auto start = routes.start.host(), place = routes.place.host();
      const auto weight = routes.weight.host();
      for (size_t i = 0; i < assignments; i += 3) {
        const auto expert = [&](size_t at) {
          return std::upper_bound(start.begin(), start.end(), place[at]) - start.begin() - 1;
        };
        ASSERT_LT(expert(i), kExperts / 3) << rows << " rows";
        ASSERT_EQ(expert(i + 1), expert(i) + kExperts / 3) << rows << " rows";
        ASSERT_EQ(expert(i + 2), expert(i + 1) + kExperts / 3) << rows << " rows";
        ASSERT_EQ(weight[i], weight[i + 2]);
      }
    }
  }
}

TEST_F(ExpertsGpu, CombinesInOrder) {
  for (const bool shared : {false, true}) {
    const size_t rows = 37, top = 6, hidden = 1032;
    const auto x = halves(rows * top * hidden, 1.0f), always = halves(rows * hidden, 1.0f);
    std::vector<int32_t> place(rows * top);
    std::iota(place.begin(), place.end(), 0);
    std::shuffle(place.begin(), place.end(), random_);
    std::vector<float> weight(rows * top), gate(rows);
    for (float& w : weight) w = std::abs(number(0.3f));
    for (float& w : gate) w = std::abs(number(0.3f));
    const DeviceVector<uint16_t> d_x(x), d_always(always), out(rows * hidden);
    const DeviceVector<float> d_weight(weight), d_gate(gate);
    const DeviceVector<int32_t> d_place(place), other(rows * top);
    CombineExpertsArgs call;
    call.x = d_x.get();
    call.routes = {8, static_cast<int32_t>(top), other.get(), other.get(), d_place.get(), d_weight.get()};
    call.rows = static_cast<int32_t>(rows);
    call.hidden = static_cast<int32_t>(hidden);
    call.shared = shared ? d_always.get() : nullptr;
    call.shared_weight = d_gate.get();
    call.out = out.get();
    finish(run_combine(call, nullptr));
    const auto got = out.host();
    for (size_t r = 0; r < rows; ++r) {
      for (size_t i = 0; i < hidden; ++i) {
        double want = 0, magnitude = 0;
        const auto add = [&](float by, uint16_t v) {
          want += double{by} * double{fp16_to_fp32(v)};
          magnitude += std::abs(double{by} * double{fp16_to_fp32(v)});
        };
        for (size_t t = 0; t < top; ++t) {
          add(weight[r * top + t], x[static_cast<size_t>(place[r * top + t]) * hidden + i]);
        }
        if (shared) add(gate[r], always[r * hidden + i]);
        const double value = fp16_to_fp32(got[r * hidden + i]);
        const double slack = magnitude * 8 * 0x1p-24 + std::abs(want) * 0x1p-11 + 0x1p-25;
        ASSERT_LE(std::abs(value - want), slack) << r << " " << i;
      }
    }
  }
}

// Layer after layer, none waiting on the host: what a kernel asks for before the one before it is done must not be
// older than the routes that it goes by. Against the same calls one by one; the sum and the norm after it also as one.
TEST_F(ExpertsGpu, ProductsMayFollowEachOtherAtOnce) {
  constexpr int64_t kHidden = 1024, kInner = 512;
  constexpr int32_t kExperts = 48, kTop = 4, kLayers = 40;
  const PlaneShape wide{2 * kInner, kHidden}, narrow{kHidden, kInner};
  const auto planes_of = [&](const PlaneShape& shape) {
    std::vector<uint8_t> bytes(shape.bytes() * kExperts);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(integer(0, 255) & 0xa7);
    return bytes;
  };
  const DeviceVector<uint8_t> wide_upper(planes_of(wide)), wide_lower(planes_of(wide)), narrow_upper(planes_of(narrow)),
      narrow_lower(planes_of(narrow));
  std::vector<float> router(kHidden * kExperts);
  for (float& w : router) w = number(0.05f);
  const DeviceVector<float> d_router(router);
  for (const int32_t rows : {1, 3, 16, 24, 64, 80}) {
    for (const bool exact : {true, false}) {
      std::vector<ExpertMatrix> gate_up(kExperts), down(kExperts);
      for (size_t e = 0; e < kExperts; ++e) {
        const size_t at = e * wide.bytes(), below = e * narrow.bytes();
        gate_up[e] = {wide_upper.get() + at, exact ? wide_lower.get() + at : nullptr, nullptr, true, false};
        down[e] = {narrow_upper.get() + below, exact ? narrow_lower.get() + below : nullptr, nullptr, true, false};
      }
      const size_t assignments = static_cast<size_t>(int64_t{rows} * kTop);
      const size_t numbers = static_cast<size_t>(rows) * kHidden;
      const DeviceVector<uint16_t> x(halves(numbers * kLayers, 1.0f)), out(numbers * kLayers),
          inner(assignments * kInner), result(assignments * kHidden), gathered(assignments * kHidden), product(numbers),
          stream(numbers);
      const DeviceVector<float> logits(static_cast<size_t>(rows * kExperts)), weight(assignments);
      const DeviceVector<int32_t> start(kExperts + 1), row(assignments), place(assignments);
      std::vector<uint16_t> want;
      for (const auto& [at_once, as_one] : {std::pair{false, false}, {true, false}, {true, true}}) {
        const bool follows = at_once;
        const auto step = [&](const Status& status) {
          ASSERT_TRUE(status.ok());
          if (!follows) {
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          }
        };
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          const size_t here = static_cast<size_t>(layer) * numbers;
          RouteArgs choose;
          choose.x = x.get() + here;
          choose.router = d_router.get();
          choose.rows = rows;
          choose.hidden = kHidden;
          choose.renormalise = true;
          choose.routes = {kExperts, kTop, start.get(), row.get(), place.get(), weight.get()};
          choose.logits = logits.get();
          if (as_one) choose.gathered = gathered.get();
          step(run_route(choose, nullptr));
          ExpertLinearCall call;
          call.matrices = gate_up.data();
          call.routes = choose.routes;
          call.n = 2 * kInner;
          call.k = kHidden;
          call.sorted = route_gathers(choose);
          call.x = call.sorted ? gathered.get() : choose.x;
          call.rows = rows;
          call.distinct = true;
          call.epilogue = ExpertEpilogue::kSwiglu;
          call.y = inner.get();
          call.gathered = gathered.get();
          step(run_expert_linear(call, nullptr));
          call.matrices = down.data();
          call.n = kHidden;
          call.k = kInner;
          call.x = inner.get();
          call.sorted = true;
          call.follows = follows;
          call.epilogue = ExpertEpilogue::kStore;
          call.y = result.get();
          step(run_expert_linear(call, nullptr));
          CombineExpertsArgs sum;
          sum.x = result.get();
          sum.routes = choose.routes;
          sum.rows = rows;
          sum.hidden = kHidden;
          sum.follows = follows;
          sum.out = product.get();
          if (!as_one) step(run_combine(sum, nullptr));
          GemmInputCall norm;
          norm.source = as_one ? GemmInputCall::Source::kExperts : GemmInputCall::Source::kNorm;
          norm.m = rows;
          norm.k = kHidden;
          norm.x = as_one ? nullptr : sum.out;
          norm.ldx = kHidden;
          norm.experts = as_one ? &sum : nullptr;
          norm.weight = d_router.get();
          norm.weight_f32 = true;
          norm.residual = x.get() + here;
          norm.ldr = kHidden;
          norm.h = stream.get();
          norm.y_f16 = out.get() + here;
          norm.ldy = kHidden;
          step(prepare_gemm_input(norm, nullptr));
        }
        finish(ok_status());
        const auto got = out.host();
        if (!at_once) {
          want = got;
        } else {
          EXPECT_TRUE(want == got) << rows << " rows, " << (exact ? "FP16" : "upper bytes")
                                   << (as_one ? ", sum and norm as one" : "");
        }
      }
    }
  }
}

TEST_F(ExpertsGpu, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(run_route({}, nullptr).ok());
  EXPECT_FALSE(run_expert_linear({}, nullptr).ok());
  EXPECT_FALSE(run_combine({}, nullptr).ok());
  EXPECT_FALSE(run_assign({}, nullptr).ok());
}

}  // namespace
}  // namespace nfp::cuda
