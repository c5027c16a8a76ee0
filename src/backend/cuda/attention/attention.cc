#include "backend/cuda/attention/attention.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <limits>
#include <mutex>

#include "backend/cuda/attention/attention_kernel.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/tensor_map.h"

namespace nfp::cuda {
namespace {

bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// From a cache block to the next, in blocks of one head.
int64_t block_heads(const AttentionCall& c) {
  const int64_t of_a_head = int64_t{c.cache.block_size} * c.head_dim;
  return c.cache.block_stride == 0 ? c.kv_heads : c.cache.block_stride / of_a_head;
}

bool is_e4m3(const AttentionCall& c) { return is_e4m3(c.cache.type); }

Status check_shape(const AttentionCall& c) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "attention: {} {}", field, rule);
  };
  if (c.kv_heads <= 0 || c.heads <= 0 || c.heads % c.kv_heads != 0 || c.heads / c.kv_heads > kMaxAttentionGroup)
    return bad("heads", "must be 1 to 16 times kv_heads");
  if (c.head_dim <= 0 || c.head_dim % 16 != 0 || c.head_dim > kMaxAttentionHeadDim)
    return bad("head_dim", "must be a multiple of 16 up to 256");
  if (c.sequences <= 0 || int64_t{c.sequences} * c.kv_heads > kMaxAttentionRows)
    return bad("sequences", "must be positive, and sequences * kv_heads at most 65536");
  return ok_status();
}

Status check_call(const AttentionCall& c) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "attention: {} {}", field, rule);
  };
  NFP_RETURN_IF_ERROR(check_shape(c));
  if (c.cache.block_size != 16 && c.cache.block_size != 32 && c.cache.block_size != 64)
    return bad("cache.block_size", "must be 16, 32 or 64");
  if (c.cache.block_stride % (int64_t{c.cache.block_size} * c.head_dim) != 0 || block_heads(c) < c.kv_heads ||
      block_heads(c) > INT_MAX)
    return bad("cache.block_stride", "must be a multiple of block_size * head_dim, and hold all of kv_heads");
  if (c.cache.keys == nullptr || c.cache.values == nullptr || !aligned(c.cache.keys, 16) ||
      !aligned(c.cache.values, 16))
    return bad("cache.keys and cache.values", "must be given and 16-byte aligned");
  if (c.q == nullptr || !aligned(c.q, 16) || c.q_stride % 8 != 0 || c.q_stride < int64_t{c.heads} * c.head_dim)
    return bad("q", "must be 16-byte aligned, with q_stride a multiple of 8 and at least heads * head_dim");
  if (c.out == nullptr || !aligned(c.out, 4)) return bad("out", "must be given and 4-byte aligned");
  if (c.query_start == nullptr || c.context == nullptr || c.block_table == nullptr)
    return bad("query_start, context and block_table", "must be given");
  if (c.table_width <= 0 || c.first_sequence < 0) return bad("table_width and first_sequence", "must not be negative");
  if (!(c.scale > 0.0f)) return bad("scale", "must be positive");
  if (c.soft_cap < 0.0f || c.window < 0) return bad("soft_cap and window", "must not be negative");
  return ok_status();
}

Status check_workspace(const AttentionCall& c, size_t needed) {
  if (c.workspace != nullptr && aligned(c.workspace, 16) && c.workspace_bytes >= needed) return ok_status();
  return error(ErrorCode::kUsage, "attention: workspace must be 16-byte aligned and have {} bytes", needed);
}

int padded_dim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
int padded_rows(int group) { return group <= 8 ? 8 : 16; }

// How much of a kernel the current device holds at once.
struct Residency {
  int blocks = 0;
  int clusters_of_16 = 0;
};

Result<Residency> find_residency(const AttentionKernel& kernel) {
  int device = 0, multiprocessors = 0, each = 0;
  Residency found;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kernel.shared_bytes));
  }
  if (status == cudaSuccess)
    status = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status == cudaSuccess)
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel.function, kernel.threads, kernel.shared_bytes);
  if (status == cudaSuccess) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {16, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(16);
    config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    // Not every device (a slice of one, say) has clusters of 16.
    if (cudaOccupancyMaxActiveClusters(&found.clusters_of_16, kernel.function, &config) != cudaSuccess) {
      found.clusters_of_16 = 0;
      cudaGetLastError();
    }
  }
  found.blocks = each * multiprocessors;
  if (status == cudaSuccess && found.blocks > 0) return found;
  return error(ErrorCode::kResource, "attention: looking up the device: {}", cudaGetErrorString(status));
}
// Looked up once a kernel (a call every layer of every step must not ask the driver again); the devices of one program
// are taken to be alike.
Result<Residency> residency(const AttentionKernel& kernel) {
  struct Entry {
    const void* function = nullptr;
    Residency found;
  };
  static std::mutex mutex;
  static Entry entries[64];
  const std::lock_guard lock(mutex);
  for (Entry& entry : entries) {
    if (entry.function == kernel.function) return entry.found;
    if (entry.function != nullptr) continue;
    NFP_ASSIGN_OR_RETURN(const Residency found, find_residency(kernel));
    entry = {kernel.function, found};
    return found;
  }
  return find_residency(kernel);
}

// The most keys that a sequence may have, as far as the host knows.
int64_t longest_context(const AttentionCall& c) {
  const int64_t capacity = int64_t{c.table_width} * c.cache.block_size;
  return c.likely_context > 0 ? std::min<int64_t>(capacity, c.likely_context) : capacity;
}

// Blocks that share each row, 0 for balanced spans: see decode.cuh. Measured on an H200, in 8B decode steps of 1 to 16
// sequences (8 to 128 rows) and alone with 3 rows (docs/attention-experiments.md): clusters are quicker where there is
// room for all of them and no block has more than 512 keys.
int choose_cluster(const AttentionCall& c, const Residency& device) {
  constexpr int kBlockKeys = 512, kLong = 8 * kBlockKeys;
  const int64_t rows = int64_t{c.sequences} * c.kv_heads;
  const int64_t longest = longest_context(c);
  if (c.deterministic || rows > 128) return 0;
  if (rows <= 8 && longest <= kBlockKeys) return 4;
  if (rows <= 4 || (rows <= 8 && longest > kLong)) {
    if (rows <= 2 && longest > kLong) return 0;  // 16 or 32 blocks would have to read a long context
    return rows <= device.clusters_of_16 ? 16 : 0;
  }
  const int cluster = rows <= 16 ? 8 : rows <= 32 ? 4 : 2;
  return longest <= int64_t{cluster} * kBlockKeys && rows * cluster <= device.blocks ? cluster : 0;
}

// Warps with spans of their own: measured on an H200 with 16 to 256 sequences of 3, 4 and 8 KV heads.
int most_cut_for_blocks(const AttentionCall& c, const Residency& device) {
  return (device.blocks * 8 - 1) / (c.kv_heads * 5);
}
bool cut_for_warps(const AttentionCall& c, const Residency& device) {
  if (c.deterministic || c.cut == DecodeCut::kBlocks || device.blocks == 0) return false;
  return c.cut == DecodeCut::kWarps || c.sequences > most_cut_for_blocks(c, device);
}

AttentionParams make_params(const AttentionCall& c) {
  constexpr float kLog2E = 1.4426950408889634f;
  AttentionParams p{};
  p.keys = static_cast<const uint8_t*>(c.cache.keys);
  p.values = static_cast<const uint8_t*>(c.cache.values);
  p.q = static_cast<const uint16_t*>(c.q);
  p.out = static_cast<uint16_t*>(c.out);
  p.query_start = c.query_start + c.first_sequence;
  p.context = c.context + c.first_sequence;
  p.block_table = c.block_table + int64_t{c.first_sequence} * c.table_width;
  p.q_stride = c.q_stride;
  p.table_width = c.table_width;
  p.block_shift = std::countr_zero(static_cast<unsigned>(c.cache.block_size));
  p.block_heads = static_cast<int>(block_heads(c));
  p.sequences = c.sequences;
  p.heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.group = c.heads / c.kv_heads;
  p.head_dim = c.head_dim;
  p.group_inverse = (uint32_t{1} << 31) / static_cast<uint32_t>(p.group) + 1;
  p.window = c.window > 0 ? c.window : INT_MAX;
  const float scale = c.scale * (is_e4m3(c) ? c.cache.key_scale : 1.0f);
  p.score_scale = c.soft_cap > 0.0f ? scale / c.soft_cap : scale * kLog2E;
  p.value_scale = is_e4m3(c) ? c.cache.value_scale : 1.0f;
  p.soft_cap = c.soft_cap * kLog2E;
  p.early_cache_reads = c.dependent_launch && c.early_cache_reads;
  return p;
}

// Up to the last block's last.
int64_t cache_rows(const AttentionCall& c) {
  return ((c.cache.blocks - 1) * block_heads(c) + c.kv_heads) * c.cache.block_size;
}

// The cache as rows of head_dim columns; columns past them read as zeros.
Status encode_cache(const AttentionCall& c, const void* data, CUtensorMap& map) {
  NFP_ASSIGN_OR_RETURN(void* const function, tensor_map_encoder());
  const auto encode = reinterpret_cast<EncodeTiled*>(function);
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(c.head_dim), static_cast<cuuint64_t>(cache_rows(c))};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(c.head_dim) * 2};
  const cuuint32_t box[2] = {64, 16};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult encoded = encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data), dims, pitch, box,
                                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded == CUDA_SUCCESS) return ok_status();
  return error(ErrorCode::kUsage, "attention: cuTensorMapEncodeTiled refused the cache ({} blocks): error {}",
               c.cache.blocks, static_cast<int>(encoded));
}

Status launch_kernel(const AttentionKernel& kernel, int64_t grid, int cluster, bool dependent, void** arguments,
                     CUstream_st* stream) {
  const LaunchShape shape{static_cast<int>(grid), cluster, kernel.threads, kernel.shared_bytes, dependent};
  return launch("attention", kernel.function, shape, arguments, stream);
}

constexpr size_t kArrivalBytes = size_t{kMaxAttentionRows} * sizeof(uint32_t);

constexpr size_t kSlotAlignment = 256;
size_t slot_bytes(const AttentionCall& c) {
  return sizeof(float) * static_cast<size_t>(padded_rows(c.heads / c.kv_heads)) * (padded_dim(c.head_dim) + 2);
}
// Arrivals, the exchange (a slot each for `spans`, at most), and what deterministic calls have.
size_t exchange_bytes(const AttentionCall& c, int spans) {
  return (slot_bytes(c) * spans + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}
size_t workspace_bytes(const AttentionCall& c, int spans) {
  const size_t chunks = c.deterministic ? static_cast<size_t>(c.sequences) * c.kv_heads * kMaxDecodeChunks : 0;
  return kArrivalBytes + exchange_bytes(c, spans) + chunks * slot_bytes(c);
}

struct DecodeKernels {
  AttentionKernel blocks, warps;
  Residency device, warps_device;
  int spans() const { return std::max(device.blocks, warps_device.blocks * kDecodeWarps); }
};

Result<DecodeKernels> decode_kernels(const AttentionCall& c) {
  const int dim = padded_dim(c.head_dim), rows = padded_rows(c.heads / c.kv_heads);
  DecodeKernels k{decode_kernel(dim, rows, c.cache.type),
                  decode_rows_kernel(dim, rows, c.cache.type, c.rotation.cos_sin != nullptr),
                  {},
                  {}};
  NFP_ASSIGN_OR_RETURN(k.device, residency(k.blocks));
  if (k.warps.function != nullptr) {
    NFP_ASSIGN_OR_RETURN(k.warps_device, residency(k.warps));
  }
  return k;
}

// The most neighbouring heads, up to a cache block's 32 KB of FP16 (128 columns), that all bundles can have.
int bundle_of(int kv_heads) {
  int bundle = std::min(kv_heads, 8);
  while (kv_heads % bundle != 0) --bundle;
  return bundle;
}

struct DecodeLaunch {
  bool warps;   // have spans of their own
  int cluster;  // blocks; 0 = none
  int64_t grid;
  friend bool operator==(const DecodeLaunch&, const DecodeLaunch&) = default;
};
DecodeLaunch decode_launch(const AttentionCall& c, const DecodeKernels& k) {
  if (cut_for_warps(c, k.warps_device)) return {true, 0, k.warps_device.blocks};
  const int64_t rows = int64_t{c.sequences} * c.kv_heads;
  const int cluster = choose_cluster(c, k.device);
  if (cluster > 0) return {false, cluster, rows * cluster};
  // No more blocks than the longest context can give work to.
  const int64_t work = std::max<int64_t>(1, longest_context(c) / kDecodeTile / kLeastDecodeSpan) * rows;
  return {false, 0, std::min<int64_t>(k.device.blocks, work)};
}

DecodeRotation make_rotation(const AttentionCall& c) {
  const AttentionCall::Rotation& r = c.rotation;
  // The mma tile's rows beyond the group are zeros, and stay so: 0 / 0 would be told as an overflow.
  const float eps = std::max(r.norm_eps, std::numeric_limits<float>::min());
  return {r.cos_sin,
          r.q_norm,
          r.k_norm,
          eps,
          r.layer,
          static_cast<uint8_t*>(const_cast<void*>(c.cache.keys)),
          static_cast<uint8_t*>(const_cast<void*>(c.cache.values)),
          r.overflowed_layer};
}

}  // namespace

bool can_rotate(const AttentionCall& c) {
  const bool kernel_can = with_kv_type(c.cache.type, [&]<KvType kKv>() {
    return c.head_dim == 64 ? kCanRotate<64, kKv> : c.head_dim == 128 && kCanRotate<128, kKv>;
  });
  return kernel_can && (!is_e4m3(c) || (c.cache.key_scale == 1.0f && c.cache.value_scale == 1.0f));
}

Result<DecodeNeeds> decode_needs(const AttentionCall& c) {
  NFP_RETURN_IF_ERROR(check_shape(c));
  NFP_ASSIGN_OR_RETURN(const DecodeKernels k, decode_kernels(c));
  const bool rotates = can_rotate(c) && !c.deterministic;
  return DecodeNeeds{workspace_bytes(c, k.spans()), rotates ? most_cut_for_blocks(c, k.warps_device) : 0,
                     plan_bytes(k.spans())};
}

Result<int> launch_context(const AttentionCall& call, int longest) {
  NFP_RETURN_IF_ERROR(check_shape(call));
  NFP_ASSIGN_OR_RETURN(const DecodeKernels k, decode_kernels(call));
  const auto launch_for = [&](int context) {
    AttentionCall c = call;
    c.likely_context = context;
    return decode_launch(c, k);
  };
  // Powers of two, so that launches are of few kinds.
  constexpr int kLeast = 256, kMost = 1 << 20;
  if (longest > kMost) return 0;
  int context = kLeast;
  while (context < longest) context *= 2;
  const DecodeLaunch known = launch_for(context);
  if (known == launch_for(0)) return 0;
  while (context < kMost && launch_for(2 * context) == known) context *= 2;
  return context;
}

namespace {

// The kernels of a call that is right.
Result<DecodeKernels> checked_kernels(const AttentionCall& c) {
  NFP_RETURN_IF_ERROR(check_call(c));
  NFP_ASSIGN_OR_RETURN(const DecodeKernels k, decode_kernels(c));
  NFP_RETURN_IF_ERROR(check_workspace(c, workspace_bytes(c, k.spans())));
  if (c.rotation.cos_sin != nullptr &&
      (!can_rotate(c) || c.q_stride < (int64_t{c.heads} + int64_t{2} * c.kv_heads) * c.head_dim ||
       !aligned(c.rotation.cos_sin, 8) || !aligned(c.rotation.q_norm, 8) || !aligned(c.rotation.k_norm, 8)))
    return error(ErrorCode::kUsage,
                 "attention: rotation needs heads of 64 or 128, cache scales of 1, k and v behind q, and 8-byte "
                 "alignment");
  return k;
}

int64_t prefill_tiles(const AttentionCall& c) {
  return (int64_t{c.tokens} * (c.heads / c.kv_heads) / kPrefillRows + c.sequences) * c.kv_heads;
}

}  // namespace

Status check_decode(const AttentionCall& c) {
  const auto kernels = checked_kernels(c);
  return kernels.ok() ? ok_status() : Status(kernels.error());
}

Status check_prefill(const AttentionCall& c) {
  NFP_RETURN_IF_ERROR(check_call(c));
  if (c.tokens <= 0) return error(ErrorCode::kUsage, "attention: tokens must be positive");
  NFP_RETURN_IF_ERROR(check_workspace(c, kPrefillWorkspaceBytes));
  if (int64_t{c.tokens} * (c.heads / c.kv_heads) >= 1 << 27 || prefill_tiles(c) > INT_MAX / 2)
    return error(ErrorCode::kUsage, "attention: tokens * heads is too large");
  if (!is_e4m3(c) && (c.cache.blocks <= 0 || c.cache.blocks > INT_MAX || cache_rows(c) > INT_MAX))
    return error(ErrorCode::kUsage, "attention: cache.blocks must be given, and at most 2^31 rows in all");
  return ok_status();
}

Result<bool> plan_decode(const AttentionCall& c, void* plan, CUstream_st* stream) {
  NFP_ASSIGN_OR_RETURN(const DecodeKernels k, checked_kernels(c));
  if (plan == nullptr || !aligned(plan, 16)) return error(ErrorCode::kUsage, "attention: plan must be 16-byte aligned");
  const DecodeLaunch launched = decode_launch(c, k);
  if (launched.cluster > 0 || c.head_dim > 128) return false;  // parts of a row need no search; no registers
  DecodeParams p{};
  p.a = make_params(c);
  p.deterministic = c.deterministic;
  p.bundle = bundle_of(c.kv_heads);
  int units = static_cast<int>(launched.grid) * (launched.warps ? kDecodeWarps : 1);
  bool warps = launched.warps;
  void* arguments[] = {&p, &units, &warps, &plan};
  const LaunchShape shape{.grid = (units + kPlanWarps - 1) / kPlanWarps, .block = kPlanWarps * 32};
  NFP_RETURN_IF_ERROR(launch("attention", plan_decode_function(), shape, arguments, stream));
  return true;
}

Status run_decode(const AttentionCall& c, CUstream_st* stream) {
  NFP_ASSIGN_OR_RETURN(const DecodeKernels k, checked_kernels(c));
  DecodeParams p{};
  p.plan = c.plan;
  p.a = make_params(c);
  p.rotation = make_rotation(c);
  p.arrivals = static_cast<uint32_t*>(c.workspace);
  uint8_t* const exchange = static_cast<uint8_t*>(c.workspace) + kArrivalBytes;
  p.exchange = reinterpret_cast<float*>(exchange);
  p.partials = reinterpret_cast<float*>(exchange + exchange_bytes(c, k.spans()));
  p.deterministic = c.deterministic;
  void* arguments[] = {&p};
  const DecodeLaunch launch = decode_launch(c, k);
  p.cluster = launch.cluster;
  p.bundle = bundle_of(c.kv_heads);
  return launch_kernel(launch.warps ? k.warps : k.blocks, launch.grid, launch.cluster, c.dependent_launch, arguments,
                       stream);
}

Status run_prefill(const AttentionCall& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check_prefill(c));
  PrefillParams p{};
  p.a = make_params(c);
  p.next_item = static_cast<int32_t*>(c.workspace);
  if (!is_e4m3(c)) {
    NFP_RETURN_IF_ERROR(encode_cache(c, c.cache.keys, p.keys));
    NFP_RETURN_IF_ERROR(encode_cache(c, c.cache.values, p.values));
  }
  const int dim = padded_dim(c.head_dim);
  const AttentionKernel kernel = prefill_kernel(dim, c.cache.type);
  NFP_ASSIGN_OR_RETURN(const Residency device, residency(kernel));
  void* arguments[] = {&p};
  return launch_kernel(kernel, std::min<int64_t>(device.blocks, prefill_tiles(c)), 1, c.dependent_launch, arguments,
                       stream);
}

}  // namespace nfp::cuda
