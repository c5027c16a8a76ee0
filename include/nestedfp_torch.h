/* Products as operators of PyTorch that its dispatcher calls without Python in between: nestedfp::linear, swiglu,
 * norm_linear, and norm alone (python/nestedfp/vllm/op.py has their schemas). The library is built without PyTorch; it
 * is bound at run time to the functions that PyTorch exports as C with a stable ABI. */
#ifndef NESTEDFP_TORCH_H
#define NESTEDFP_TORCH_H

#include "nestedfp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Registers the operators' CUDA form, once for a process; schemas are the caller's to define. The paths are those of
 * the libtorch_cpu.so and libtorch_cuda.so that the process has loaded. NFP_UNSUPPORTED: a function is missing in them.
 */
NFP_API nfp_status nfp_torch_bind(const char* libtorch_cpu, const char* libtorch_cuda);
/* What products on the CUDA device `index` use; both are kept and must outlive the process's products.
 * independent_start: see nfp_linear_set_independent_start. */
NFP_API nfp_status nfp_torch_set_device(int32_t index, nfp_gpu* gpu, void* workspace, size_t workspace_bytes,
                                        int32_t independent_start);
/* What norm_linear and norm on that device sum over where their argument `reduce` is true. Kept; NULL: nothing. */
NFP_API nfp_status nfp_torch_set_all_reduce(int32_t index, const nfp_all_reduce* all_reduce);
/* The precision in force: an nfp_precision, or -1: FP8 for products of more than `threshold` rows, else FP16. */
NFP_API void nfp_torch_set_precision(int32_t forced, int64_t threshold);
/* 1: every product runs in the other precision first, and then in the one in force, whose result it is. One warm-up so
 * loads the kernels of CUDA graphs of both precisions. 0, the default: in the one in force only. */
NFP_API void nfp_torch_set_warm_up(int32_t both);
/* Operators keep the tensors of weights and biases that they have seen, so that an address means one of them. This lets
 * them go: for the time while weights are loaded. */
NFP_API void nfp_torch_forget(int32_t index);
/* Operators keep a copy of each bias in FP32 too, which CUDA graphs hold. This makes it again, where it lies, once a
 * bias has been written to in place: that at the address `bias`, or all for null. On the device's current stream. */
NFP_API nfp_status nfp_torch_refresh(int32_t index, const void* bias);

#ifdef __cplusplus
}
#endif

#endif
