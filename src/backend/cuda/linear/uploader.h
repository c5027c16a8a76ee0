// Host bytes to the device while more are being made: a ring of pinned memory that all threads fill and one stream
// empties. Reading, packing and copying overlap, across weights too; host memory stays at the ring's size, and the
// device needs nothing beside the destination.
//
// One object serves all weights of a model and is freed once they are loaded.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"

struct CUstream_st;
struct CUevent_st;

namespace nfp::cuda {

class DeviceUploader {
 public:
  static constexpr size_t kRingBytes = size_t{64} << 20;

  // On the current device, which hangs where it has not taken what it was sent within hang_s seconds.
  static Result<std::unique_ptr<DeviceUploader>> create(double hang_s, size_t ring_bytes = kRingBytes);
  ~DeviceUploader();
  DeviceUploader(const DeviceUploader&) = delete;
  DeviceUploader& operator=(const DeviceUploader&) = delete;

  // What one item of a transfer becomes on the device.
  struct Copy {
    void* device = nullptr;
    size_t offset = 0;  // in the item's memory
    size_t bytes = 0;
  };

  // For each item of 0 .. items - 1: reserves bytes(item) of the ring (256-byte aligned), calls fill(thread, item,
  // memory), and enqueues copies(item). Threads take items as they come. fill is called by all threads at once. Returns
  // when all are filled; copies may still be under way. The error is that of the first item that failed.
  struct Transfer {
    int64_t items = 0;
    std::function<size_t(int64_t item)> bytes;
    std::function<Status(int thread, int64_t item, uint8_t* memory)> fill;
    std::function<void(int64_t item, std::vector<Copy>& out)> copies;
  };
  Status run(ThreadPool& threads, const Transfer& transfer);

  // Waits until everything has arrived.
  Status finish();

 private:
  // A reserved stretch of the ring, [begin, end) of offsets that only grow; memory is at their remainder by the ring's
  // size.
  struct Region {
    uint64_t begin = 0;
    uint64_t end = 0;
    CUevent_st* arrived = nullptr;  // recorded once `issued`
    bool issued = false;
  };

  explicit DeviceUploader(double hang_s) : hang_s_(hang_s) {}
  // See wait_at_most.
  template <class Query>
  Status wait(Query query) const;
  Result<Region*> reserve(size_t bytes);
  Status issue(Region& region, std::span<const Copy> copies);

  const double hang_s_;
  int device_ = 0;
  uint8_t* ring_ = nullptr;
  size_t ring_bytes_ = 0;
  CUstream_st* stream_ = nullptr;
  std::mutex mutex_;                // of what follows
  std::condition_variable issued_;  // some region is
  std::deque<Region> regions_;      // oldest first; references stay valid, as only ends are added and removed
  std::vector<CUevent_st*> free_events_;
  uint64_t next_ = 0;
};

}  // namespace nfp::cuda
