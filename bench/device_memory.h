// Device memory of a benchmark, and the end of it where something fails: a benchmark has nobody to return an error to.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/result.h"

namespace nfp::bench {

[[noreturn]] inline void fail(std::string_view message) {
  fmt::print(stderr, "error: {}\n", message);
  std::exit(1);
}

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) fail(result.error().message);
  return std::move(result).value();
}
inline void must(const Status& status) {
  if (!status.ok()) fail(status.error().message);
}

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes, int fill = 0) {
    if (cudaMalloc(&data_, bytes) != cudaSuccess || cudaMemset(data_, fill, bytes) != cudaSuccess) {
      fail(fmt::format("no {} MB of device memory", bytes >> 20));
    }
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;

  template <typename T>
  T* as([[maybe_unused]] size_t offset = 0) const {
    if constexpr (std::is_void_v<T>) {
      return data_;
    } else {
      return static_cast<T*>(data_) + offset;
    }
  }
  void* get() const { return data_; }
  template <typename T>
  void upload(const std::vector<T>& host) {
    cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  }

 private:
  void* data_ = nullptr;
};

}  // namespace nfp::bench
