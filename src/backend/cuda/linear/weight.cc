#include "backend/cuda/linear/weight.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/cuda/device_hangs.h"
#include "backend/cuda/linear/weight_plan.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kExtrasPiece = size_t{64} << 10;
size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

Result<uint8_t*> allocate(size_t bytes, const std::string& name) {
  void* data = nullptr;
  if (bytes == 0) return static_cast<uint8_t*>(nullptr);
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaSuccess) return static_cast<uint8_t*>(data);
  cudaGetLastError();  // a refused allocation is not a fault of the device
  return error(ErrorCode::kResource, "{}: {} MiB of device memory for weights: {}; use a smaller model or another GPU",
               name, bytes >> 20, cudaGetErrorString(status));
}

}  // namespace

Result<std::unique_ptr<CudaWeight>> CudaWeight::make(const LinearSpec& spec, DeviceUploader& uploader,
                                                     ThreadPool& threads) {
  NFP_ASSIGN_OR_RETURN(const WeightPlan plan, WeightPlan::make(spec));
  std::unique_ptr<CudaWeight> weight(new CudaWeight);
  weight->n_ = plan.n();
  weight->k_ = plan.k();
  weight->interleaved_ = plan.interleaved();
  NFP_RETURN_IF_ERROR(weight->take_memory(plan));
  std::vector<float> scales(static_cast<size_t>(plan.n()), 1.0f);
  Status status = weight->upload_matrices(plan, uploader, threads, scales);
  if (status.ok()) status = weight->upload_extras(plan, uploader, threads, scales);
  if (status.ok()) return weight;
  (void)uploader.finish();  // what is under way must not arrive in memory that has been freed
  return std::move(status).error();
}

Status CudaWeight::take_memory(const WeightPlan& plan) {
  for (const SegmentPlan& segment : plan.segments()) {
    planes_bytes_ += aligned(segment.matrix_bytes(plan.k())) * (segment.nested ? 2 : 1);
    has_dense_ = has_dense_ || !segment.nested;
  }
  NFP_ASSIGN_OR_RETURN(planes_, allocate(planes_bytes_, plan.name()));
  uint8_t* next = planes_;
  for (const SegmentPlan& segment : plan.segments()) {
    const size_t bytes = aligned(segment.matrix_bytes(plan.k()));
    WeightSegment out;
    out.nested = segment.nested;
    out.first_column = segment.first_column;
    out.rows = segment.rows;
    if (segment.nested) {
      out.matrix = {next, next + bytes, nullptr, segment.rows, plan.k(), segment.join};
      next += 2 * bytes;
    } else {
      out.dense = reinterpret_cast<const uint16_t*>(next);
      next += bytes;
    }
    segments_.push_back(out);
  }
  return ok_status();
}

Status CudaWeight::upload_matrices(const WeightPlan& plan, DeviceUploader& uploader, ThreadPool& threads,
                                   std::vector<float>& scales) {
  std::vector<WeightPlan::Staging> staging(static_cast<size_t>(threads.size()));
  const auto piece_of = [&](int64_t item) -> const WeightPiece& { return plan.pieces()[static_cast<size_t>(item)]; };
  const auto segment_of = [&](const WeightPiece& piece) -> const WeightSegment& {
    return segments_[static_cast<size_t>(piece.segment)];
  };
  DeviceUploader::Transfer transfer;
  transfer.items = static_cast<int64_t>(plan.pieces().size());
  transfer.bytes = [&](int64_t item) {
    const WeightPiece& piece = piece_of(item);
    return plan.piece_bytes(piece) * (segment_of(piece).nested ? 2 : 1);
  };
  transfer.fill = [&](int thread, int64_t item, uint8_t* memory) {
    const WeightPiece& piece = piece_of(item);
    float* piece_scales = scales.data() + segment_of(piece).first_column + piece.first_row;
    return plan.fill(piece, memory, memory + plan.piece_bytes(piece), piece_scales,
                     staging[static_cast<size_t>(thread)]);
  };
  transfer.copies = [&](int64_t item, std::vector<DeviceUploader::Copy>& out) {
    const WeightPiece& piece = piece_of(item);
    const WeightSegment& segment = segment_of(piece);
    const size_t at = plan.piece_offset(piece), bytes = plan.piece_bytes(piece);
    if (segment.nested) {
      out.push_back({const_cast<uint8_t*>(segment.matrix.upper) + at, 0, bytes});
      out.push_back({const_cast<uint8_t*>(segment.matrix.lower) + at, bytes, bytes});
    } else {
      out.push_back({reinterpret_cast<uint8_t*>(const_cast<uint16_t*>(segment.dense)) + at, 0, bytes});
    }
  };
  return uploader.run(threads, transfer);
}

Status CudaWeight::upload_extras(const WeightPlan& plan, DeviceUploader& uploader, ThreadPool& threads,
                                 const std::vector<float>& scales) {
  std::vector<uint8_t> extras;
  const auto append = [&](const void* data, size_t bytes) {
    const size_t at = extras.size();
    extras.resize(aligned(at + bytes));
    std::memcpy(extras.data() + at, data, bytes);
    return at;
  };
  struct Place {
    size_t scale = 0, bias = 0, bias_f16 = 0;
  };
  const std::vector<float> bias = plan.bias();
  std::vector<Place> places(segments_.size());
  for (size_t s = 0; s < places.size(); ++s) {
    const WeightSegment& segment = segments_[s];
    const auto rows = static_cast<size_t>(segment.rows);
    const float* first_scale = scales.data() + segment.first_column;
    const bool scaled = std::any_of(first_scale, first_scale + rows, [](float scale) { return scale != 1.0f; });
    places[s].scale = scaled ? append(first_scale, rows * sizeof(float)) : SIZE_MAX;
    if (bias.empty()) continue;
    const float* first_bias = bias.data() + segment.first_column;
    places[s].bias = append(first_bias, rows * sizeof(float));
    if (segment.nested) continue;
    std::vector<uint16_t> halves(rows);
    std::transform(first_bias, first_bias + rows, halves.begin(), fp32_to_fp16);
    places[s].bias_f16 = append(halves.data(), rows * sizeof(uint16_t));
  }
  extras_bytes_ = extras.size();
  NFP_ASSIGN_OR_RETURN(extras_, allocate(extras.size(), plan.name()));
  const auto piece_bytes = [&](size_t at) { return std::min(kExtrasPiece, extras.size() - at); };
  DeviceUploader::Transfer transfer;
  transfer.items = static_cast<int64_t>((extras.size() + kExtrasPiece - 1) / kExtrasPiece);
  transfer.bytes = [&](int64_t item) { return piece_bytes(static_cast<size_t>(item) * kExtrasPiece); };
  transfer.fill = [&](int, int64_t item, uint8_t* memory) {
    const size_t at = static_cast<size_t>(item) * kExtrasPiece;
    std::memcpy(memory, extras.data() + at, piece_bytes(at));
    return ok_status();
  };
  transfer.copies = [&](int64_t item, std::vector<DeviceUploader::Copy>& out) {
    const size_t at = static_cast<size_t>(item) * kExtrasPiece;
    out.push_back({extras_ + at, 0, piece_bytes(at)});
  };
  NFP_RETURN_IF_ERROR(uploader.run(threads, transfer));
  for (size_t s = 0; s < places.size(); ++s) {
    WeightSegment& segment = segments_[s];
    if (places[s].scale != SIZE_MAX) {
      segment.matrix.row_scale = reinterpret_cast<const float*>(extras_ + places[s].scale);
    }
    if (bias.empty()) continue;
    segment.bias = reinterpret_cast<const float*>(extras_ + places[s].bias);
    if (!segment.nested) segment.bias_f16 = reinterpret_cast<const uint16_t*>(extras_ + places[s].bias_f16);
  }
  return ok_status();
}

CudaWeight::~CudaWeight() {
  if (device_hangs()) return;
  cudaFree(planes_);
  cudaFree(extras_);
}

size_t CudaWeight::bytes_read(Precision precision) const {
  const bool both = is_exact(precision);
  size_t bytes = 0;
  for (const WeightSegment& segment : segments_) {
    if (segment.nested) {
      bytes += PlaneShape{segment.rows, k_}.bytes() * (both ? 2 : 1);
    } else {
      bytes += static_cast<size_t>(segment.rows * k_) * sizeof(uint16_t);
    }
  }
  return bytes;
}

}  // namespace nfp::cuda
