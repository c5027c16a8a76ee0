// What needs no device: numbers, layout, policies.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "backend/cuda/attention/attention.h"
#include "backend/cuda/gemm/plan/pack.h"
#include "base/cpu_topology.h"
#include "base/float_types.h"
#include "base/thread_pool.h"
#include "capi/status.h"
#include "nested/format.h"
#include "nested/matrix_analysis.h"
#include "policy/policy.h"

namespace nfp::capi {
namespace {

thread_local std::string last_error;

int thread_count(int32_t threads) { return threads > 0 ? threads : std::max(1, usable_cpu_count()); }

WeightType type_of(nfp_type type) { return type == NFP_BF16 ? WeightType::kBF16 : WeightType::kF16; }

// Also padded to whole blocks (64 rows, 128 columns) its bytes are then within 63 bits.
bool fits_memory(int64_t rows, int64_t columns) {
  return rows > 0 && columns > 0 && rows <= INT64_MAX / 64 / 128 / columns;
}

nfp_status check_matrix(const char* what, int64_t rows, int64_t columns, int32_t threads) {
  constexpr int32_t kMostThreads = 1024;
  NFP_CAPI_REQUIRE(fits_memory(rows, columns),
                   "{}: the matrix is [{}, {}]; rows and columns must be positive, and all of it within memory", what,
                   rows, columns);
  NFP_CAPI_REQUIRE(threads >= 0 && threads <= kMostThreads, "{}: threads is {}, must be 0 to {}", what, threads,
                   kMostThreads);
  return NFP_OK;
}

nfp_status check_type(const char* what, const nfp_type& type) {
  NFP_CAPI_REQUIRE(is_one_of(type, 2), "{}: type is unknown", what);
  return NFP_OK;
}

}  // namespace

nfp_status fail(nfp_status code, std::string_view message) {
  last_error = message;
  std::replace(last_error.begin(), last_error.end(), '\n', ' ');  // one line, whatever a caller's text has in it
  return code;
}

}  // namespace nfp::capi

using nfp::capi::check_matrix;
using nfp::capi::check_type;
using nfp::capi::complete;
using nfp::capi::fail;
using nfp::capi::fits_memory;
using nfp::capi::guarded;
using nfp::capi::is_one_of;

struct nfp_policy {
  std::unique_ptr<nfp::PrecisionPolicy> policy;
};

extern "C" {

int32_t nfp_abi_version(void) { return NFP_ABI_VERSION; }
int64_t nfp_max_attention_rows(void) { return nfp::cuda::kMaxAttentionRows; }
const char* nfp_version(void) { return NFP_VERSION; }
const char* nfp_build(void) {
#ifdef NFP_HAVE_CUDA
  return "cuda";
#else
  return "cpu";
#endif
}
const char* nfp_last_error(void) { return nfp::capi::last_error.c_str(); }

nfp_status nfp_split(const uint16_t* weights, size_t count, uint8_t* upper, uint8_t* lower) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(count == 0 || (weights != nullptr && upper != nullptr && lower != nullptr),
                     "nfp_split: a pointer is null");
    for (size_t i = 0; i < count; ++i) {
      if (!nfp::is_nestable(weights[i])) {
        return fail(NFP_INVALID_INPUT, fmt::format("nfp_split: weight {} is {}; at most 1.75 can be split without a "
                                                   "row exponent (nfp_analyse finds them)",
                                                   i, nfp::fp16_to_fp32(weights[i])));
      }
    }
    nfp::split({weights, count}, upper, lower);
    return NFP_OK;
  });
}

nfp_status nfp_join(const uint8_t* upper, const uint8_t* lower, size_t count, uint16_t* weights) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(count == 0 || (weights != nullptr && upper != nullptr && lower != nullptr),
                     "nfp_join: a pointer is null");
    nfp::join(upper, lower, count, weights);
    return NFP_OK;
  });
}

nfp_status nfp_analyse(const uint16_t* weights, int64_t rows, int64_t columns, nfp_type type, int32_t threads,
                       int8_t* exponents, nfp_matrix_report* report) {
  return guarded([&]() -> nfp_status {
    if (const auto bad = check_matrix("nfp_analyse", rows, columns, threads); bad != NFP_OK) return bad;
    if (const auto bad = check_type("nfp_analyse", type); bad != NFP_OK) return bad;
    NFP_CAPI_REQUIRE(weights != nullptr && exponents != nullptr && complete(report),
                     "nfp_analyse: a pointer is null, or report->size is not sizeof(nfp_matrix_report)");
    nfp::MatrixSource source;
    source.name = "the matrix";
    source.rows = rows;
    source.cols = columns;
    source.type = nfp::capi::type_of(type);
    source.read = [&](int64_t first, int64_t count, uint16_t* out) {
      std::copy_n(weights + first * columns, count * columns, out);
      return nfp::ok_status();
    };
    nfp::ThreadPool pool(nfp::capi::thread_count(threads));
    const auto found = nfp::analyse_matrix(source, pool);
    if (!found.ok()) return fail(found.error());
    const bool nests = found->storage == nfp::Storage::kNested;
    report->nests = nests ? 1 : 0;
    report->nests_by_paper = found->nests_by_paper ? 1 : 0;
    report->largest = found->largest;
    report->largest_row = found->largest_row;
    report->rows_shifted = found->rows_shifted;
    report->inexact = found->inexact();
    report->largest_error = nests ? found->largest_error_nested : found->largest_error_fp16;
    const size_t length = std::min(found->reason.size(), sizeof(report->reason) - 1);
    std::memcpy(report->reason, found->reason.data(), length);
    report->reason[length] = '\0';
    if (nests) {
      std::copy(found->exponents.begin(), found->exponents.end(), exponents);
    } else {
      std::fill_n(exponents, rows, int8_t{0});
    }
    return NFP_OK;
  });
}

nfp_status nfp_nest(const uint16_t* weights, int64_t rows, int64_t columns, nfp_type type, const int8_t* exponents,
                    int32_t threads, uint8_t* upper, uint8_t* lower) {
  return guarded([&]() -> nfp_status {
    if (const auto bad = check_matrix("nfp_nest", rows, columns, threads); bad != NFP_OK) return bad;
    if (const auto bad = check_type("nfp_nest", type); bad != NFP_OK) return bad;
    NFP_CAPI_REQUIRE(weights != nullptr && upper != nullptr && lower != nullptr, "nfp_nest: a pointer is null");
    nfp::ThreadPool pool(nfp::capi::thread_count(threads));
    std::vector<int64_t> too_large(static_cast<size_t>(pool.size()), rows);
    pool.run([&](int thread) {
      const nfp::Range range = nfp::partition(rows, thread, pool.size());
      std::vector<uint16_t> shifted(static_cast<size_t>(columns));
      for (int64_t r = range.begin; r < range.end; ++r) {
        const auto row = std::span(weights + r * columns, static_cast<size_t>(columns));
        nfp::shift_row(row, nfp::capi::type_of(type), exponents == nullptr ? 0 : exponents[r], shifted.data());
        if (!std::all_of(shifted.begin(), shifted.end(), nfp::is_nestable)) {
          too_large[static_cast<size_t>(thread)] = std::min(too_large[static_cast<size_t>(thread)], r);
          continue;
        }
        nfp::split(shifted, upper + r * columns, lower + r * columns);
      }
    });
    const int64_t first = *std::min_element(too_large.begin(), too_large.end());
    if (first == rows) return NFP_OK;
    return fail(
        NFP_INVALID_INPUT,
        fmt::format("nfp_nest: row {} has weights over 1.75 with the exponent given; nfp_analyse finds one", first));
  });
}

nfp_status nfp_unnest(const uint8_t* upper, const uint8_t* lower, int64_t rows, int64_t columns, nfp_type type,
                      const int8_t* exponents, int32_t threads, uint16_t* weights) {
  return guarded([&]() -> nfp_status {
    if (const auto bad = check_matrix("nfp_unnest", rows, columns, threads); bad != NFP_OK) return bad;
    if (const auto bad = check_type("nfp_unnest", type); bad != NFP_OK) return bad;
    NFP_CAPI_REQUIRE(weights != nullptr && upper != nullptr && lower != nullptr, "nfp_unnest: a pointer is null");
    nfp::ThreadPool pool(nfp::capi::thread_count(threads));
    pool.parallel_for(rows, 1, [&](nfp::Range range) {
      for (int64_t r = range.begin; r < range.end; ++r) {
        uint16_t* row = weights + r * columns;
        nfp::join(upper + r * columns, lower + r * columns, static_cast<size_t>(columns), row);
        const int exponent = exponents == nullptr ? 0 : exponents[r];
        if (type == NFP_F16 && exponent == 0) continue;
        for (int64_t c = 0; c < columns; ++c) {
          const float value = std::ldexp(nfp::fp16_to_fp32(row[c]), exponent);
          row[c] = type == NFP_BF16 ? nfp::fp32_to_bf16(value) : nfp::fp32_to_fp16(value);
        }
      }
    });
    return NFP_OK;
  });
}

size_t nfp_plane_bytes(int64_t n, int64_t k) { return fits_memory(n, k) ? nfp::cuda::PlaneShape{n, k}.bytes() : 0; }
size_t nfp_expert_bytes(int64_t n, int64_t k) { return 2 * nfp_plane_bytes(n, k); }
int64_t nfp_e4m3_row_bytes(int64_t k) { return fits_memory(1, k) ? nfp::cuda::PlaneShape{0, k}.padded_k() : 0; }

nfp_status nfp_pack(const uint8_t* bytes, int64_t n, int64_t k, nfp_plane plane, nfp_join_kind join, int32_t threads,
                    uint8_t* packed) {
  return guarded([&]() -> nfp_status {
    if (const auto bad = check_matrix("nfp_pack", n, k, threads); bad != NFP_OK) return bad;
    NFP_CAPI_REQUIRE(bytes != nullptr && packed != nullptr, "nfp_pack: a pointer is null");
    NFP_CAPI_REQUIRE(is_one_of(plane, 2), "nfp_pack: plane is unknown");
    NFP_CAPI_REQUIRE(is_one_of(join, 2), "nfp_pack: join is unknown");
    using namespace nfp::cuda;
    const PlaneShape shape{n, k};
    const Plane which = plane == NFP_LOWER ? Plane::kLower : Plane::kUpper;
    const Join kind = join == NFP_JOIN_FREE ? Join::kFree : Join::kBiased;
    nfp::ThreadPool pool(nfp::capi::thread_count(threads));
    pool.parallel_for(shape.row_blocks(), 1, [&](nfp::Range range) {
      for (int64_t block = range.begin; block < range.end; ++block) {
        const int64_t first = block * kBlockRows;
        const int rows = static_cast<int>(std::min<int64_t>(kBlockRows, n - first));
        uint8_t* slab = packed + static_cast<size_t>(block) * shape.slab_bytes();
        pack_rows(shape, which, kind, {bytes + first * k, static_cast<size_t>(rows * k)}, 0, rows, slab);
        if (rows < kBlockRows) pack_zero_rows(shape, which, kind, rows, kBlockRows - rows, slab);
      }
    });
    return NFP_OK;
  });
}

nfp_status nfp_policy_create(const char* text, nfp_policy** policy) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(text != nullptr && policy != nullptr, "nfp_policy_create: a pointer is null");
    auto made = nfp::parse_policy(text, nfp::Precision::kFp8W8A8, /*shares=*/false);
    if (!made.ok()) return fail(made.error());
    if (made.value()->needs_sensitivity()) {
      return fail(NFP_UNSUPPORTED, fmt::format("precision policy '{}': a share of the layers is not to be had through "
                                               "this interface; use threshold:TOKENS",
                                               text));
    }
    *policy = new nfp_policy{std::move(made).value()};
    return NFP_OK;
  });
}

void nfp_policy_destroy(nfp_policy* policy) { delete policy; }

nfp_status nfp_policy_choose(nfp_policy* policy, const nfp_step_load* load, nfp_precision* precision) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(policy != nullptr && complete(load) && precision != nullptr,
                     "nfp_policy_choose: a pointer is null, or load->size is not sizeof(nfp_step_load)");
    nfp::StepLoad step;
    step.step_tokens = load->step_tokens;
    step.prefill_tokens = load->prefill_tokens;
    step.running = load->running;
    step.waiting = load->waiting;
    step.kv_use = load->kv_use;
    step.recent_tpot_s = load->recent_tpot_s;
    step.recent_ttft_s = load->recent_ttft_s;
    step.step_index = load->step_index;
    *precision = nfp::is_exact(policy->policy->choose(step)) ? NFP_PRECISION_FP16 : NFP_PRECISION_FP8;
    return NFP_OK;
  });
}

}  // extern "C"
