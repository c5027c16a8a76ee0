// What GPU tests share.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace nfp::cuda {

inline bool has_hopper() {
  int count = 0, major = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

template <typename T>
class DeviceVector {
 public:
  // Poisoned: NaN in every float format, -1 in integers.
  explicit DeviceVector(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, count * sizeof(T)), cudaSuccess);
  }
  explicit DeviceVector(const std::vector<T>& host) : DeviceVector(host.size()) {
    EXPECT_EQ(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceVector() { cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;
  T* get() const { return static_cast<T*>(data_); }
  std::vector<T> host() const {
    std::vector<T> out(count_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t count_;
};

// Another context of the first GPU than the runtime's: current in this thread for as long as it lives.
class OtherContext {
 public:
  OtherContext() {
    using Create = CUresult(CUcontext*, unsigned, CUdevice);  // of CUDA 3.2 to 12
    EXPECT_EQ(reinterpret_cast<Create*>(find("cuCtxCreate", 3020))(&handle_, 0, 0), CUDA_SUCCESS);
  }
  ~OtherContext() {
    EXPECT_EQ(reinterpret_cast<decltype(&cuCtxDestroy)>(find("cuCtxDestroy", 12000))(handle_), CUDA_SUCCESS);
  }
  OtherContext(const OtherContext&) = delete;
  OtherContext& operator=(const OtherContext&) = delete;
  bool is_current() const {
    CUcontext now = nullptr;
    EXPECT_EQ(reinterpret_cast<decltype(&cuCtxGetCurrent)>(find("cuCtxGetCurrent", 12000))(&now), CUDA_SUCCESS);
    return now == handle_;
  }

 private:
  static void* find(const char* name, unsigned version) {
    void* found = nullptr;
    EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, nullptr), cudaSuccess);
    return found;
  }

  CUcontext handle_ = nullptr;
};

}  // namespace nfp::cuda
