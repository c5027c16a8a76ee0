#include "backend/cuda/gemm/gemm.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/kernel/kernels.h"
#include "backend/cuda/row_peaks.h"
#include "backend/cuda/tensor_map.h"

namespace nfp::cuda {
namespace {

Status check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ok_status();
  return error(ErrorCode::kResource, "{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

Operand operand_of(Mode mode, Join join) {
  switch (mode) {
    case Mode::kF16:
      return join == Join::kBiased ? Operand::kF16Biased : Operand::kF16Free;
    case Mode::kBF16:
      return join == Join::kBiased ? Operand::kBF16Biased : Operand::kBF16Free;
    case Mode::kE4M3:
      return Operand::kE4M3;
    case Mode::kE4M3Promoted:
      return Operand::kE4M3Promoted;
    case Mode::kW8A16:
      break;
  }
  return Operand::kW8A16;
}

bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

int64_t columns_of(const GemmCall& call) { return call.swiglu ? call.w.n / 2 : call.w.n; }

// The copy engine writes whole rows of 16-byte pieces; other shapes and types go element by element.
bool has_bulk_stores(const GemmCall& call) {
  const bool pieces =
      call.ldd % 8 == 0 && aligned(call.d, 16) &&
      (call.residual == nullptr || (call.ldr % 8 == 0 && columns_of(call) % 8 == 0 && aligned(call.residual, 16)));
  return pieces && call.output == bulk_store_type(call.mode) && !(call.swiglu && call.residual != nullptr);
}

Status check_call(const GemmCall& c) {
  const int64_t columns = columns_of(c);
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "nested gemm: {} {}", field, rule);
  };
  if (c.m <= 0 || c.m > kMaxGemmSize) return bad("m", "must be 1 to 2^30");
  if (c.w.n <= 0 || c.w.n > kMaxGemmSize) return bad("w.n", "must be 1 to 2^30");
  if (c.w.k <= 0 || c.w.k > kMaxGemmSize) return bad("w.k", "must be 1 to 2^30");
  if (c.w.upper == nullptr || !aligned(c.w.upper, 16))
    return bad("w.upper", "must be a 16-byte aligned device pointer");
  if (reads_lower(c.mode) && (c.w.lower == nullptr || !aligned(c.w.lower, 16))) {
    return bad("w.lower", "must be a 16-byte aligned device pointer in the FP16 and BF16 modes");
  }
  const int64_t x_size = is_fp8(c.mode) ? 1 : 2;
  const int64_t x_width = is_fp8(c.mode) ? PlaneShape{c.w.n, c.w.k}.padded_k() : c.w.k;
  if (c.x == nullptr || !aligned(c.x, 16)) return bad("x", "must be a 16-byte aligned device pointer");
  if (c.ldx < x_width) return bad("ldx", "is smaller than a row of x");
  if (c.ldx * x_size % 16 != 0)
    return bad("ldx", "must be a multiple of 16 bytes (the copy engine's rule); pad the rows");
  const bool finds_largest = c.output == Output::kLargest;
  const size_t d_size = finds_largest ? sizeof(uint64_t) : c.output == Output::kF32 ? 4 : 2;
  if (c.d == nullptr || !aligned(c.d, d_size)) return bad("d", "must be a device pointer aligned to its elements");
  if (!finds_largest && c.ldd < columns) return bad("ldd", "is smaller than a row of d");
  if (finds_largest && (c.swiglu || c.residual != nullptr))
    return bad("output", "cannot be kLargest with swiglu or a residual");
  if (c.residual != nullptr && (!aligned(c.residual, d_size) || c.ldr < columns))
    return bad("residual", "is misaligned, or ldr smaller than a row");
  if (c.swiglu && c.w.n % 16 != 0) return bad("w.n", "must be a multiple of 16 with swiglu");
  if (c.peaks != nullptr && (!c.swiglu || !is_fp8(c.mode) || c.m > RowPeaks::kRows || !has_bulk_stores(c)))
    return bad("peaks",
               fmt::format("need swiglu in an E4M3 mode, at most {} tokens and rows of d that go out by whole lines",
                           RowPeaks::kRows));
  if (c.token_scale != nullptr && !is_fp8(c.mode)) return bad("token_scale", "belongs to the E4M3 modes");
  return ok_status();
}

constexpr cuuint32_t kElementSteps[2] = {1, 1};

// The tensor maps that the copy engine reads x by.
Status map_x(EncodeTiled* encode, const GemmCall& call, const Config& config, KernelParams* p) {
  const bool fp8 = is_fp8(call.mode);
  const PlaneShape shape{call.w.n, call.w.k};
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(fp8 ? shape.padded_k() : call.w.k),
                              static_cast<cuuint64_t>(call.m)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(call.ldx * (fp8 ? 1 : 2))};
  const auto type =
      fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
          : (call.mode == Mode::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
  p->last_token = static_cast<int>((call.m - 1) / load_tokens(config.tile) * load_tokens(config.tile));
  p->tail_rows = tail_rows(config.tile, call.m);
  CUresult status = CUDA_SUCCESS;
  for (const auto& [map, rows] : {std::pair{&p->x, box_tokens(config.tile)}, {&p->x_tail, p->tail_rows}}) {
    const cuuint32_t box[2] = {fp8 ? 128u : 64u, static_cast<cuuint32_t>(rows)};
    if (status == CUDA_SUCCESS) {
      status = encode(map, type, 2, const_cast<void*>(call.x), dims, pitch, box, kElementSteps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
  }
  if (status == CUDA_SUCCESS) return ok_status();
  return error(ErrorCode::kUsage, "nested gemm: cuTensorMapEncodeTiled refused x (m {}, k {}, ldx {}): error {}",
               call.m, call.w.k, call.ldx, static_cast<int>(status));
}

// The tensor map that the copy engine writes d by.
Status map_d(EncodeTiled* encode, const GemmCall& call, const Config& config, KernelParams* p) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns_of(call)), static_cast<cuuint64_t>(call.m)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(call.ldd * 2)};
  const cuuint32_t box[2] = {call.swiglu ? 32u : 64u, static_cast<cuuint32_t>(staging_tokens(config.tile))};
  const CUresult status =
      encode(&p->d_map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.d, dims, pitch, box, kElementSteps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, call.swiglu ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return ok_status();
  return error(ErrorCode::kUsage, "nested gemm: cuTensorMapEncodeTiled refused d (m {}, n {}, ldd {}): error {}",
               call.m, columns_of(call), call.ldd, static_cast<int>(status));
}

void set_operands(const GemmCall& call, KernelParams* p) {
  p->upper = call.w.upper;
  p->lower = call.w.lower;
  p->d = call.d;
  p->residual = call.residual;
  p->row_scale = call.w.row_scale;
  p->bias = call.bias;
  p->token_scale = call.token_scale;
  p->peaks = call.peaks;
  p->counters = static_cast<uint32_t*>(call.workspace.data);
  p->partials = call.workspace.data == nullptr
                    ? nullptr
                    : reinterpret_cast<float*>(static_cast<uint8_t*>(call.workspace.data) + Workspace::kCounterBytes);
  p->ldd = call.ldd;
  p->ldr = call.ldr;
  p->weight_scale = reads_lower(call.mode) ? 1.0f : 0x1p-8f;
  p->one = 1;
  p->is_bf16 = call.output == Output::kBF16 ? 1 : 0;
  p->is_f32 = call.output == Output::kF32 ? 1 : 0;
  p->finds_largest = call.output == Output::kLargest ? 1 : 0;
  p->swiglu = call.swiglu ? 1 : 0;
  p->bulk_stores = has_bulk_stores(call) ? 1 : 0;
}

void set_schedule(const GemmCall& call, const Schedule& schedule, KernelParams* p) {
  const PlaneShape shape{call.w.n, call.w.k};
  p->m = static_cast<int>(call.m);
  p->n = static_cast<int>(call.w.n);
  p->row_blocks = static_cast<int>(shape.row_blocks());
  p->k_groups = static_cast<int>(shape.k_groups());
  p->k_iterations = schedule.k_iterations;
  p->m_tiles = schedule.m_tiles;
  p->n_tiles = schedule.n_tiles;
  p->tiles = schedule.tiles();
  p->group_m = schedule.group_m;
  p->split_tiles = schedule.split_tiles;
  p->shares = schedule.shares;
  p->length = schedule.length;
  p->exchange = schedule.exchange;
  p->sliced = schedule.sliced;
}

// Where weights are read once, which is where reading is what takes the time.
void set_pace(const Schedule& schedule, const Tile& tile, KernelParams* p) {
  constexpr int kBurst = 2;                // stages; measured in decode steps (docs/kernel-experiments.md)
  constexpr double kBytesPerCycle = 2490;  // of an H200's memory: 4.6 TB/s at 1.85 GHz
  p->burst = kBurst;
  if (schedule.m_tiles > 1) return;
  const double bytes = tile.rows() * 128.0;  // of a stage (64.0 in W8A16 beyond 64 tokens, where little is gained)
  p->pace = static_cast<uint32_t>(bytes * schedule.grid / kBytesPerCycle);
}

Status launch(const KernelEntry& entry, const Schedule& schedule, bool dependent, Stream stream, KernelParams* p) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(schedule.grid));
  launch.blockDim = dim3(static_cast<unsigned>(entry.threads));
  launch.dynamicSmemBytes = static_cast<size_t>(entry.shared_bytes);
  launch.stream = stream;
  launch.attrs = attributes;
  if (schedule.cluster > 1) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[launch.numAttrs++].val.clusterDim = {static_cast<unsigned>(schedule.cluster), 1, 1};
  }
  if (dependent) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[launch.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  void* arguments[] = {p};
  return check(cudaLaunchKernelExC(&launch, entry.function, arguments), "launching the nested gemm");
}

}  // namespace

Result<Gemm> Gemm::create() {
  int id = 0;
  NFP_RETURN_IF_ERROR(check(cudaGetDevice(&id), "no usable CUDA device"));
  cudaDeviceProp properties{};
  NFP_RETURN_IF_ERROR(check(cudaGetDeviceProperties(&properties, id), "reading the device's properties"));
  if (properties.major != 9 || properties.minor != 0) {
    return error(
        ErrorCode::kUnsupported,
        "{} has compute capability {}.{}; the CUDA backend runs on 9.0 (H100, H200, GH200) only: use the CPU backend",
        properties.name, properties.major, properties.minor);
  }
  Gemm gemm;
  gemm.device_.sms = properties.multiProcessorCount;
  NFP_ASSIGN_OR_RETURN(gemm.encode_tensor_map_, tensor_map_encoder());
  for (size_t operand = 0; operand < kOperands; ++operand) {
    for (const KernelEntry& entry : kernels(static_cast<Operand>(operand))) {
      NFP_RETURN_IF_ERROR(
          check(cudaFuncSetAttribute(entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes),
                "sizing shared memory"));
    }
  }
  for (const int blocks_per_sm : {1, 2}) {
    const auto group = kernels(Operand::kF16Biased);
    const auto at = std::find_if(group.begin(), group.end(), [&](const KernelEntry& e) {  // any that fills an SM
      return e.tile.blocks_per_sm == blocks_per_sm && e.tile.cluster == 1 && e.tile.rows() == 128;
    });
    if (at == group.end()) continue;
    const KernelEntry& entry = *at;
    DeviceShape::Clusters& clusters = gemm.device_.clusters[static_cast<size_t>(blocks_per_sm - 1)];
    clusters[1] = gemm.device_.sms * blocks_per_sm;
    for (unsigned blocks = 2; blocks <= static_cast<unsigned>(kMaxCluster); ++blocks) {
      cudaLaunchAttribute attribute;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {blocks, 1, 1};
      cudaLaunchConfig_t launch{};
      launch.gridDim = dim3(blocks);
      launch.blockDim = dim3(static_cast<unsigned>(entry.threads));
      launch.dynamicSmemBytes = static_cast<size_t>(entry.shared_bytes);
      launch.attrs = &attribute;
      launch.numAttrs = 1;
      NFP_RETURN_IF_ERROR(
          check(cudaOccupancyMaxActiveClusters(&clusters[blocks], entry.function, &launch), "counting clusters"));
    }
  }
  return gemm;
}

Status Gemm::run(const GemmCall& call, const Config& config, Stream stream) const {
  NFP_RETURN_IF_ERROR(check_call(call));
  const auto group = kernels(operand_of(call.mode, call.w.join));
  const auto entry =
      std::find_if(group.begin(), group.end(), [&](const KernelEntry& e) { return e.tile == config.tile; });
  if (entry == group.end()) {
    return error(ErrorCode::kUsage, "nested gemm: no kernel for '{}' in mode {}", to_string(config),
                 name_of(call.mode));
  }
  if (call.peaks != nullptr && config.tile.tokens > RowPeaks::kTileTokens) {
    return error(ErrorCode::kUsage, "nested gemm: '{}' finds no peaks: its tiles have more than {} tokens",
                 to_string(config), RowPeaks::kTileTokens);
  }
  const Schedule schedule = make_schedule(call.problem(), config, device_);
  const size_t needed = Workspace::kCounterBytes + schedule.partial_floats(config.tile) * sizeof(float);
  if (schedule.partial_floats(config.tile) != 0 &&
      (call.workspace.data == nullptr || call.workspace.bytes < needed || !aligned(call.workspace.data, 16))) {
    return error(ErrorCode::kUsage, "nested gemm: '{}' needs {} bytes of 16-byte aligned workspace, {} given",
                 to_string(config), needed, call.workspace.data == nullptr ? 0 : call.workspace.bytes);
  }
  KernelParams p{};
  set_operands(call, &p);
  set_schedule(call, schedule, &p);
  set_pace(schedule, config.tile, &p);
  const auto encode = reinterpret_cast<EncodeTiled*>(encode_tensor_map_);
  NFP_RETURN_IF_ERROR(map_x(encode, call, config, &p));
  if (p.bulk_stores != 0) NFP_RETURN_IF_ERROR(map_d(encode, call, config, &p));
  return launch(*entry, schedule, call.dependent_launch, stream, &p);
}

}  // namespace nfp::cuda
