// A small PyTorch for tests of operators: the functions that torch_shim looks up, over tensors without values.
#pragma once

#include <cstdint>

#include "capi/torch_shim.h"

extern "C" {
nfp::capi::TensorHandle torch_of_tests_tensor(int64_t rows, int64_t columns, int32_t dtype);
// It is on that CUDA device, and no longer on 0.
nfp::capi::TensorHandle torch_of_tests_on(int32_t device, nfp::capi::TensorHandle tensor);
const int64_t* torch_of_tests_sizes(nfp::capi::TensorHandle tensor);
int64_t torch_of_tests_live();  // tensors that nobody has let go of
// What an operator was registered with; null: it was not.
nfp::capi::StableKernel torch_of_tests_kernel(const char* name);
int32_t aoti_torch_delete_tensor_object(nfp::capi::TensorHandle tensor);
const char* torch_of_tests_failure();  // what the last operator that failed said
void torch_of_tests_forget_failure();
}
