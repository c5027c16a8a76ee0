// A mixture's expert products on a Hopper GPU: gate and up of unsorted rows with SwiGLU, then down, with what brings
// tokens into order and rounds them, and routes by chance. One JSON object a line: microseconds of both, of what
// reading the chosen experts' bytes allows at 4.45 TB/s, and the rate of arithmetic. Every kernel that can run a case
// takes its turns within it.
//
//   cuda_experts_bench [SEED] [ROWS,ROWS...]
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/experts/experts.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/gemm/tune/test_data.h"
#include "backend/cuda/gemm/tune/timing.h"
#include "device_memory.h"

namespace {

using namespace nfp;
using namespace nfp::cuda;
using bench::DeviceMemory;
using bench::must;

constexpr int kRoutes = 4;  // routes of their own, in turns, so that weights come from memory
constexpr int kRounds = 7;

struct Shape {
  const char* name;
  int64_t hidden, inner;
  int32_t experts, top;
};
constexpr Shape kShapes[] = {
    {"qwen3-30b-a3b", 2048, 768, 128, 8}, {"olmoe-7b", 2048, 1024, 64, 8}, {"mixtral-8x7b", 4096, 14336, 8, 2}};

enum class Precision { kF16, kBF16, kW8A16, kE4M3 };
constexpr const char* kNames[] = {"fp16", "bf16", "fp8", "fp8-w8a8"};

// A stack of experts' matrices.
struct Stack {
  Stack(int64_t n, int64_t k, int32_t experts, uint64_t seed)
      : shape{n, k},
        upper(shape.bytes() * static_cast<size_t>(experts)),
        lower(shape.bytes() * static_cast<size_t>(experts)) {
    for (int32_t e = 0; e < experts; ++e) {
      const size_t at = shape.bytes() * static_cast<size_t>(e);
      fill_weights(shape, seed + static_cast<uint64_t>(e), upper.as<uint8_t>() + at, lower.as<uint8_t>() + at, nullptr,
                   nullptr, nullptr);
    }
  }
  std::vector<ExpertMatrix> matrices(int32_t experts, Precision precision) const {
    std::vector<ExpertMatrix> out(static_cast<size_t>(experts));
    for (size_t e = 0; e < out.size(); ++e) {
      out[e].upper = upper.as<uint8_t>() + shape.bytes() * e;
      const bool exact = precision == Precision::kF16 || precision == Precision::kBF16;
      out[e].lower = exact ? lower.as<uint8_t>() + shape.bytes() * e : nullptr;
      out[e].biased = true;
    }
    return out;
  }
  PlaneShape shape;
  DeviceMemory upper, lower;
};

struct Routes {
  Routes(int64_t rows, const Shape& s, std::mt19937& random)
      : start(static_cast<size_t>(s.experts + 1) * 4),
        row(static_cast<size_t>(rows * s.top) * 4),
        place(static_cast<size_t>(rows * s.top) * 4),
        weight(static_cast<size_t>(rows * s.top) * 4) {
    std::vector<std::vector<int32_t>> of(static_cast<size_t>(s.experts));  // row * top + t
    std::vector<int32_t> order(static_cast<size_t>(s.experts));
    std::iota(order.begin(), order.end(), 0);
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t t = 0; t < s.top; ++t) {
        const auto other = std::uniform_int_distribution<int32_t>(t, s.experts - 1)(random);
        std::swap(order[static_cast<size_t>(t)], order[static_cast<size_t>(other)]);
        of[static_cast<size_t>(order[static_cast<size_t>(t)])].push_back(r * s.top + t);
      }
    }
    std::vector<int32_t> starts{0}, rows_of, places(static_cast<size_t>(rows * s.top));
    for (const auto& list : of) {
      for (const int32_t at : list) {
        places[static_cast<size_t>(at)] = static_cast<int32_t>(rows_of.size());
        rows_of.push_back(at / s.top);
      }
      starts.push_back(static_cast<int32_t>(rows_of.size()));
      active += list.empty() ? 0 : 1;
    }
    cudaMemcpy(start.as<int32_t>(), starts.data(), starts.size() * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(row.as<int32_t>(), rows_of.data(), rows_of.size() * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(place.as<int32_t>(), places.data(), places.size() * 4, cudaMemcpyHostToDevice);
    table = {s.experts, s.top, start.as<int32_t>(), row.as<int32_t>(), place.as<int32_t>(), weight.as<float>()};
  }
  DeviceMemory start, row, place, weight;
  ExpertRoutes table;
  int active = 0;
};

void measure(const Shape& s, int64_t rows, const Stack& gate_up, const Stack& down, std::mt19937& random) {
  const auto assignments = static_cast<size_t>(rows * s.top), hidden = static_cast<size_t>(s.hidden),
             inner = static_cast<size_t>(s.inner);
  DeviceMemory x(static_cast<size_t>(rows) * hidden * 2), scale(assignments * 4), gathered(assignments * hidden * 2),
      middle(assignments * inner * 2), codes(assignments * inner), out(assignments * hidden * 2);
  fill_f16(rows * s.hidden, 1, x.as<uint16_t>(), nullptr);
  std::vector<std::unique_ptr<Routes>> routes;
  double active = 0;
  for (int i = 0; i < kRoutes; ++i) {
    routes.push_back(std::make_unique<Routes>(rows, s, random));
    active += static_cast<double>(routes.back()->active) / kRoutes;
  }
  struct Method {
    Precision precision;
    int32_t tile;
    GraphTimer timer;
    std::vector<double> times;
  };
  std::vector<Method> methods;
  const int launches = rows >= 2048 ? kRoutes : 4 * kRoutes;
  for (const Precision precision : {Precision::kF16, Precision::kBF16, Precision::kW8A16, Precision::kE4M3}) {
    const auto first = gate_up.matrices(s.experts, precision), second = down.matrices(s.experts, precision);
    const double mean = static_cast<double>(assignments) / s.experts;
    for (const int32_t tile : {-1, 0, 8, 16, 32, 64, 128, 160, 256}) {
      const bool uppers = precision == Precision::kE4M3 || precision == Precision::kW8A16;
      if ((uppers && tile > 128) || (precision == Precision::kE4M3 && tile != 0 && tile < 32)) continue;  // not there
      if (tile < 0 && rows > 512) continue;
      if (tile > 0 && (tile > 16 * std::max(mean, 1.0) || 8 * tile < mean)) continue;
      const auto launch = [&, precision, tile](int index, CUstream_st* stream) -> Status {
        ExpertLinearCall c;
        c.routes = routes[static_cast<size_t>(index % kRoutes)]->table;
        c.matrices = first.data();
        c.n = 2 * s.inner;
        c.k = s.hidden;
        c.rows = rows;
        c.epilogue = ExpertEpilogue::kSwiglu;
        c.tile_tokens = tile;
        c.e4m3 = precision == Precision::kE4M3;
        c.bf16 = precision == Precision::kBF16;
        c.x = x.as<uint16_t>();
        c.gathered = gathered.as<uint8_t>();
        c.y = middle.as<uint16_t>();
        const auto round = [&](int64_t m, uint8_t* to, bool spread) -> Status {
          GemmInputCall call;
          call.m = m;
          call.k = c.k;
          call.x = c.x;
          call.ldx = c.k;
          call.y_e4m3 = to;
          call.ldy_e4m3 = c.k;
          call.scales = scale.as<float>();
          call.place = spread ? c.routes.place : nullptr;
          call.copies = spread ? s.top : 0;
          c.x = to;
          c.sorted = true;
          c.token_scale = scale.as<float>();
          return prepare_gemm_input(call, stream);
        };
        if (c.e4m3) {
          if (Status status = round(rows, gathered.as<uint8_t>(), true); !status.ok()) return status;
        }
        if (Status status = run_expert_linear(c, stream); !status.ok()) return status;
        c.matrices = second.data();
        c.n = s.hidden;
        c.k = s.inner;
        c.epilogue = ExpertEpilogue::kStore;
        c.sorted = true;
        c.follows = !c.e4m3;
        c.x = middle.as<uint16_t>();
        if (c.e4m3) {
          if (Status status = round(static_cast<int64_t>(assignments), codes.as<uint8_t>(), false); !status.ok()) {
            return status;
          }
        }
        c.y = out.as<uint16_t>();
        return run_expert_linear(c, stream);
      };
      methods.push_back({precision, tile, must(GraphTimer::create(launches, launch)), {}});
      must(methods.back().timer.replay());
    }
  }
  std::vector<size_t> turns(methods.size());
  std::iota(turns.begin(), turns.end(), size_t{0});
  for (int round = 0; round < kRounds; ++round) {
    std::shuffle(turns.begin(), turns.end(), random);
    for (const size_t i : turns) methods[i].times.push_back(must(methods[i].timer.replay()));
  }
  const double weights = active * 3.0 * static_cast<double>(hidden * inner);
  const double operations = 6.0 * static_cast<double>(assignments) * static_cast<double>(hidden * inner);
  for (Method& m : methods) {
    const double us = median_of(m.times);
    const double bytes = weights * (m.precision == Precision::kF16 || m.precision == Precision::kBF16 ? 2 : 1);
    fmt::print(
        "{{\"shape\": \"{}\", \"rows\": {}, \"active\": {:.1f}, \"precision\": \"{}\", \"tile\": {}, \"us\": {:.2f}, "
        "\"reading_us\": {:.2f}, \"tb_s\": {:.2f}, \"tflop_s\": {:.0f}}}\n",
        s.name, rows, active, kNames[static_cast<int>(m.precision)], m.tile, us, bytes / 4.45e6, bytes / us * 1e-6,
        operations / us * 1e-6);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937 random(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1);
  std::vector<int64_t> rows;
  std::string list = argc > 2 ? argv[2] : "1,8,32,64,128,512,2048,8192";
  for (size_t at = 0; at < list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    rows.push_back(std::atoll(list.substr(at, comma - at).c_str()));
    at = comma + 1;
  }
  for (const Shape& s : kShapes) {
    const Stack gate_up(2 * s.inner, s.hidden, s.experts, 11), down(s.hidden, s.inner, s.experts, 12);
    for (const int64_t r : rows) measure(s, r, gate_up, down, random);
  }
  return 0;
}
