#include "capi/testing/torch_of_tests.h"

#include <array>
#include <map>
#include <string>

using nfp::capi::LibraryHandle;
using nfp::capi::StableKernel;
using nfp::capi::TensorHandle;

struct AtenTensorUsed {
  std::array<int64_t, 2> sizes, strides;
  int32_t dtype;
  int32_t device = 0;
  alignas(16) std::array<char, 16> data;
};

namespace {

int64_t live = 0;
std::string failure;
std::map<std::string, StableKernel>& kernels() {
  static std::map<std::string, StableKernel> all;
  return all;
}
AtenTensorUsed* used(TensorHandle tensor) { return reinterpret_cast<AtenTensorUsed*>(tensor); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

TensorHandle torch_of_tests_tensor(int64_t rows, int64_t columns, int32_t dtype) {
  ++live;
  return reinterpret_cast<TensorHandle>(new AtenTensorUsed{{rows, columns}, {columns, 1}, dtype, 0, {}});
}
const int64_t* torch_of_tests_sizes(TensorHandle tensor) { return used(tensor)->sizes.data(); }
TensorHandle torch_of_tests_on(int32_t device, TensorHandle tensor) {
  used(tensor)->device = device;
  return tensor;
}
int64_t torch_of_tests_live() { return live; }
StableKernel torch_of_tests_kernel(const char* name) { return kernels()[name]; }
const char* torch_of_tests_failure() { return failure.c_str(); }
void torch_of_tests_forget_failure() { failure.clear(); }

int32_t aoti_torch_get_data_ptr(TensorHandle tensor, void** data) {
  *data = used(tensor)->data.data();
  return 0;
}
int32_t aoti_torch_get_dim(TensorHandle, int64_t* dims) {
  *dims = 2;
  return 0;
}
int32_t aoti_torch_get_sizes(TensorHandle tensor, int64_t** sizes) {
  *sizes = used(tensor)->sizes.data();
  return 0;
}
int32_t aoti_torch_get_strides(TensorHandle tensor, int64_t** strides) {
  *strides = used(tensor)->strides.data();
  return 0;
}
int32_t aoti_torch_get_numel(TensorHandle tensor, int64_t* elements) {
  *elements = used(tensor)->sizes[0] * used(tensor)->sizes[1];
  return 0;
}
int32_t aoti_torch_get_dtype(TensorHandle tensor, int32_t* dtype) {
  *dtype = used(tensor)->dtype;
  return 0;
}
int32_t aoti_torch_get_device_index(TensorHandle tensor, int32_t* index) {
  *index = used(tensor)->device;
  return 0;
}
int32_t aoti_torch_empty_strided(int64_t, const int64_t* sizes, const int64_t*, int32_t dtype, int32_t, int32_t,
                                 TensorHandle* made) {
  *made = torch_of_tests_tensor(sizes[0], sizes[1], dtype);
  return 0;
}
int32_t aoti_torch_copy_(TensorHandle, TensorHandle, int32_t) { return 0; }
int32_t aoti_torch_delete_tensor_object(TensorHandle tensor) {
  --live;
  delete used(tensor);
  return 0;
}
int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, LibraryHandle* library) {
  *library = reinterpret_cast<LibraryHandle>(&kernels());
  return 0;
}
int32_t aoti_torch_library_impl(LibraryHandle, const char* name, StableKernel kernel) {
  kernels()[name] = kernel;
  return 0;
}
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
void aoti_torch_check(bool condition, const char*, const char*, uint32_t, const char* message) {
  if (!condition) failure = message;
}
int32_t aoti_torch_dtype_float16() { return 5; }
int32_t aoti_torch_dtype_bfloat16() { return 15; }
int32_t aoti_torch_dtype_float32() { return 6; }
int32_t aoti_torch_dtype_uint8() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }

}  // extern "C"
#pragma GCC visibility pop
