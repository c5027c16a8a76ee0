// The CUDA context that a thread works in. A program's own threads have the first GPU's and need none of this; those of
// a library's caller may have another one current.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>

namespace nfp::cuda {

class Context {
 public:
  Context() = default;
  // The calling thread's, once it has used its device.
  static Context current() {
    Context context;
    if (find("cuCtxGetCurrent", context.get_) && find("cuCtxPopCurrent", context.pop_) &&
        find("cuCtxPushCurrent", context.push_)) {
      context.get_(&context.handle_);
    }
    return context;
  }
  // Makes it the calling thread's until what this returns is gone. Null where it is that already, or there is none.
  std::shared_ptr<void> enter() const {
    CUcontext now = nullptr;
    if (handle_ == nullptr || (get_(&now) == CUDA_SUCCESS && now == handle_)) return nullptr;
    if (push_(handle_) != CUDA_SUCCESS) return nullptr;
    return {handle_, [pop = pop_](void*) {
              CUcontext left = nullptr;
              pop(&left);
            }};
  }

 private:
  // There is no link to the driver's library.
  template <typename F>
  static bool find(const char* name, F*& function) {
    void* found = nullptr;
    const cudaError_t looked = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, nullptr);
    function = reinterpret_cast<F*>(found);
    return looked == cudaSuccess && found != nullptr;
  }

  CUcontext handle_ = nullptr;
  decltype(&::cuCtxGetCurrent) get_ = nullptr;
  decltype(&::cuCtxPushCurrent) push_ = nullptr;
  decltype(&::cuCtxPopCurrent) pop_ = nullptr;
};

}  // namespace nfp::cuda
