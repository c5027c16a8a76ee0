#include "backend/cuda/linear/uploader.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>

#include "backend/cuda/device_hangs.h"

namespace nfp::cuda {
namespace {

constexpr size_t kAlignment = 256;

Status check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ok_status();
  return error(ErrorCode::kResource, "uploading weights: {}: {}", what, cudaGetErrorString(status));
}

size_t aligned(size_t bytes) { return std::max((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment); }

}  // namespace

Result<std::unique_ptr<DeviceUploader>> DeviceUploader::create(double hang_s, size_t ring_bytes) {
  std::unique_ptr<DeviceUploader> uploader(new DeviceUploader(hang_s));
  uploader->ring_bytes_ = aligned(ring_bytes);
  NFP_RETURN_IF_ERROR(check(cudaGetDevice(&uploader->device_), "no usable CUDA device"));
  NFP_RETURN_IF_ERROR(check(cudaHostAlloc(reinterpret_cast<void**>(&uploader->ring_), uploader->ring_bytes_, 0),
                            "pinning host memory"));
  NFP_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&uploader->stream_, cudaStreamNonBlocking), "creating a stream"));
  return uploader;
}

DeviceUploader::~DeviceUploader() {
  if (stream_ != nullptr && !wait_at_most(hang_s_, [this] { return cudaStreamQuery(stream_); })) return;
  for (const Region& region : regions_) cudaEventDestroy(region.arrived);
  for (CUevent_st* event : free_events_) cudaEventDestroy(event);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (ring_ != nullptr) cudaFreeHost(ring_);
}

template <class Query>
Status DeviceUploader::wait(Query query) const {
  if (const auto status = wait_at_most(hang_s_, query, std::chrono::microseconds(20))) return check(*status, "copying");
  return error(ErrorCode::kDevice, "uploading weights: the GPU has not taken them within {:g} s: it hangs", hang_s_);
}

Result<DeviceUploader::Region*> DeviceUploader::reserve(size_t bytes) {
  const size_t need = aligned(bytes);
  if (need > ring_bytes_) {
    return error(ErrorCode::kResource, "uploading weights: a piece of {} bytes does not fit a ring of {}", bytes,
                 ring_bytes_);
  }
  std::unique_lock lock(mutex_);
  while (true) {
    uint64_t begin = next_;
    if (begin % ring_bytes_ + need > ring_bytes_) begin += ring_bytes_ - begin % ring_bytes_;
    const uint64_t end = begin + need;
    if (regions_.empty() || end - regions_.front().begin <= ring_bytes_) {
      Region region{begin, end, nullptr, false};
      if (free_events_.empty()) {
        NFP_RETURN_IF_ERROR(check(cudaEventCreateWithFlags(&region.arrived, cudaEventDisableTiming), "an event"));
      } else {
        region.arrived = free_events_.back();
        free_events_.pop_back();
      }
      next_ = end;
      regions_.push_back(region);
      return &regions_.back();
    }
    // Whoever fills the oldest region waits for nobody, so it will be issued.
    if (!regions_.front().issued) {
      issued_.wait(lock);
      continue;
    }
    NFP_RETURN_IF_ERROR(wait([this] { return cudaEventQuery(regions_.front().arrived); }));
    free_events_.push_back(regions_.front().arrived);
    regions_.pop_front();
  }
}

Status DeviceUploader::issue(Region& region, std::span<const Copy> copies) {
  const uint8_t* memory = ring_ + region.begin % ring_bytes_;
  Status status = ok_status();
  for (const Copy& copy : copies) {
    if (!status.ok()) break;
    status = check(cudaMemcpyAsync(copy.device, memory + copy.offset, copy.bytes, cudaMemcpyHostToDevice, stream_),
                   "copying");
  }
  if (status.ok()) status = check(cudaEventRecord(region.arrived, stream_), "recording an event");
  {
    const std::lock_guard lock(mutex_);
    region.issued = true;
  }
  issued_.notify_all();
  return status;
}

Status DeviceUploader::run(ThreadPool& threads, const Transfer& transfer) {
  std::atomic<int64_t> next{0};
  std::mutex failure_mutex;
  std::optional<Error> failure;
  int64_t failed_item = transfer.items;
  threads.run([&](int thread) {
    const auto fail = [&](int64_t item, Error reason) {
      const std::lock_guard lock(failure_mutex);
      if (item < failed_item) {
        failed_item = item;
        failure = std::move(reason);
      }
      next = transfer.items;  // no more
    };
    if (const Status status = check(cudaSetDevice(device_), "choosing the device"); !status.ok()) {
      return fail(0, status.error());
    }
    std::vector<Copy> copies;
    while (true) {
      const int64_t item = next.fetch_add(1);
      if (item >= transfer.items) return;
      auto region = reserve(transfer.bytes(item));
      if (!region.ok()) return fail(item, std::move(region).error());
      Status status = transfer.fill(thread, item, ring_ + (*region)->begin % ring_bytes_);
      copies.clear();
      if (status.ok()) transfer.copies(item, copies);
      Status issued = issue(**region, copies);  // also when there is nothing to copy: others wait for the region
      if (!status.ok()) return fail(item, std::move(status).error());
      if (!issued.ok()) return fail(item, std::move(issued).error());
    }
  });
  if (failure) return *std::move(failure);
  return ok_status();
}

Status DeviceUploader::finish() {
  const std::lock_guard lock(mutex_);
  NFP_RETURN_IF_ERROR(wait([this] { return cudaStreamQuery(stream_); }));
  for (const Region& region : regions_) free_events_.push_back(region.arrived);
  regions_.clear();
  return ok_status();
}

}  // namespace nfp::cuda
