// PyTorch's functions for extensions, as C with a stable ABI (torch/csrc/inductor/aoti_torch/c/shim.h of PyTorch 2.9
// and later), looked up in the libraries that the process has loaded.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/result.h"

namespace nfp::capi {

using TensorHandle = struct AtenTensorOpaque*;
using LibraryHandle = struct TorchLibraryOpaque*;
// An argument or result of an operator: a number, or a pointer.
using StableValue = uint64_t;
using StableKernel = void (*)(StableValue* stack, uint64_t inputs, uint64_t outputs);

// Functions that return int32_t give 0, or another value once they have failed.
struct TorchShim {
  int32_t (*get_data_ptr)(TensorHandle, void**) = nullptr;
  int32_t (*get_dim)(TensorHandle, int64_t*) = nullptr;
  int32_t (*get_sizes)(TensorHandle, int64_t**) = nullptr;    // borrowed
  int32_t (*get_strides)(TensorHandle, int64_t**) = nullptr;  // borrowed
  int32_t (*get_numel)(TensorHandle, int64_t*) = nullptr;
  int32_t (*get_dtype)(TensorHandle, int32_t*) = nullptr;
  int32_t (*get_device_index)(TensorHandle, int32_t*) = nullptr;
  int32_t (*empty_strided)(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                           int32_t device_type, int32_t device_index, TensorHandle*) = nullptr;
  int32_t (*copy)(TensorHandle to, TensorHandle from, int32_t non_blocking) = nullptr;
  int32_t (*delete_tensor)(TensorHandle) = nullptr;
  int32_t (*library_init_impl)(const char* name_space, const char* dispatch_key, const char* file, uint32_t line,
                               LibraryHandle*) = nullptr;
  int32_t (*library_impl)(LibraryHandle, const char* name, StableKernel) = nullptr;
  int32_t (*current_stream)(int32_t device_index, void**) = nullptr;
  // Throws PyTorch's exception unless `condition`.
  void (*check)(bool condition, const char* function, const char* file, uint32_t line, const char* message) = nullptr;
  int32_t f16 = 0, bf16 = 0, f32 = 0, u8 = 0;  // dtypes
  int32_t cuda = 0;                            // device type

  // kUnsupported: a function is missing; the message names it.
  static Result<TorchShim> load(const char* libtorch_cpu, const char* libtorch_cuda);
};

// A tensor of PyTorch that is ours to let go.
class TorchTensor {
 public:
  TorchTensor() = default;
  TorchTensor(const TorchShim* torch, TensorHandle handle) : torch_(torch), handle_(handle) {}
  TorchTensor(TorchTensor&& other) noexcept : torch_(other.torch_), handle_(std::exchange(other.handle_, nullptr)) {}
  TorchTensor& operator=(TorchTensor&& other) noexcept {
    std::swap(torch_, other.torch_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~TorchTensor() {
    if (handle_ != nullptr) torch_->delete_tensor(handle_);
  }
  TensorHandle get() const { return handle_; }
  // For the operator's results, which PyTorch takes over.
  StableValue release() { return reinterpret_cast<StableValue>(std::exchange(handle_, nullptr)); }
  explicit operator bool() const { return handle_ != nullptr; }
  void* data() const {
    void* pointer = nullptr;
    torch_->get_data_ptr(handle_, &pointer);
    return pointer;
  }

 private:
  const TorchShim* torch_ = nullptr;
  TensorHandle handle_ = nullptr;
};

}  // namespace nfp::capi
