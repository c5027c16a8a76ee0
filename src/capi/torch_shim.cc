#include "capi/torch_shim.h"

#include <dlfcn.h>

namespace nfp::capi {
namespace {

// Looks names up until one is missing.
class Symbols {
 public:
  Status open(const char* path) {
    library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // loaded already: this counts one user more, for good
    if (library_ != nullptr) return ok_status();
    return error(ErrorCode::kUnsupported, "PyTorch's {} cannot be opened: {}", path, dlerror());
  }
  template <typename F>
  void find(const char* name, F** function) {
    *function = reinterpret_cast<F*>(dlsym(library_, name));
    if (*function == nullptr && missing_.empty()) missing_ = name;
  }
  int32_t constant(const char* name) {
    int32_t (*function)() = nullptr;
    find(name, &function);
    return function == nullptr ? 0 : function();
  }
  Status found() const {
    if (missing_.empty()) return ok_status();
    return error(ErrorCode::kUnsupported, "this PyTorch has no {}: install 2.9 or later, built with CUDA", missing_);
  }

 private:
  void* library_ = nullptr;
  std::string missing_;
};

}  // namespace

Result<TorchShim> TorchShim::load(const char* libtorch_cpu, const char* libtorch_cuda) {
  TorchShim torch;
  Symbols symbols;
  NFP_RETURN_IF_ERROR(symbols.open(libtorch_cpu));
  symbols.find("aoti_torch_get_data_ptr", &torch.get_data_ptr);
  symbols.find("aoti_torch_get_dim", &torch.get_dim);
  symbols.find("aoti_torch_get_sizes", &torch.get_sizes);
  symbols.find("aoti_torch_get_strides", &torch.get_strides);
  symbols.find("aoti_torch_get_numel", &torch.get_numel);
  symbols.find("aoti_torch_get_dtype", &torch.get_dtype);
  symbols.find("aoti_torch_get_device_index", &torch.get_device_index);
  symbols.find("aoti_torch_empty_strided", &torch.empty_strided);
  symbols.find("aoti_torch_copy_", &torch.copy);
  symbols.find("aoti_torch_delete_tensor_object", &torch.delete_tensor);
  symbols.find("aoti_torch_library_init_impl", &torch.library_init_impl);
  symbols.find("aoti_torch_library_impl", &torch.library_impl);
  symbols.find("aoti_torch_check", &torch.check);
  torch.f16 = symbols.constant("aoti_torch_dtype_float16");
  torch.bf16 = symbols.constant("aoti_torch_dtype_bfloat16");
  torch.f32 = symbols.constant("aoti_torch_dtype_float32");
  torch.u8 = symbols.constant("aoti_torch_dtype_uint8");
  torch.cuda = symbols.constant("aoti_torch_device_type_cuda");
  NFP_RETURN_IF_ERROR(symbols.open(libtorch_cuda));
  symbols.find("aoti_torch_get_current_cuda_stream", &torch.current_stream);
  NFP_RETURN_IF_ERROR(symbols.found());
  return torch;
}

}  // namespace nfp::capi
