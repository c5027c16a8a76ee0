// A library without the Hopper kernels: every device function says so.
#include "backend/cuda/gemm/plan/layout.h"
#include "capi/status.h"

namespace {
nfp_status none() {
  return nfp::capi::fail(NFP_UNSUPPORTED, "this libnestedfp was built without CUDA; build it with nvcc 13 on the path");
}
}  // namespace

extern "C" {

nfp_status nfp_gpu_create(nfp_gpu**) { return none(); }
void nfp_gpu_destroy(nfp_gpu*) {}
const char* nfp_gpu_name(const nfp_gpu*) { return ""; }
nfp_status nfp_gpu_read_choices(nfp_gpu*, const char*) { return none(); }
size_t nfp_gpu_workspace_bytes(void) { return 0; }
int64_t nfp_max_quantised_columns(void) { return 0; }
nfp_status nfp_gpu_nest(nfp_gpu*, const void*, int64_t, int64_t, int64_t, nfp_type, nfp_join_kind, uint8_t*, uint8_t*,
                        float*, nfp_gpu_report*, nfp_stream) {
  return none();
}
nfp_status nfp_gpu_pack(nfp_gpu*, const uint8_t*, int64_t, int64_t, int64_t, nfp_plane, nfp_join_kind, uint8_t*,
                        nfp_stream) {
  return none();
}
nfp_status nfp_gpu_unnest(nfp_gpu*, const uint8_t*, const uint8_t*, const float*, int64_t, int64_t, nfp_join_kind,
                          nfp_type, void*, int64_t, nfp_stream) {
  return none();
}
nfp_status nfp_linear_create(nfp_gpu*, const nfp_weight*, void*, size_t, nfp_linear**) { return none(); }
void nfp_linear_destroy(nfp_linear*) {}
void nfp_linear_set_independent_start(nfp_linear*, int32_t) {}
size_t nfp_linear_scratch_bytes(const nfp_linear*, int64_t) { return 0; }
nfp_status nfp_linear_run(nfp_linear*, nfp_precision, nfp_type, int64_t, const void*, int64_t, void*, int64_t,
                          const float*, void*, nfp_stream) {
  return none();
}
nfp_status nfp_linear_run_swiglu(nfp_linear*, nfp_precision, nfp_type, int64_t, const void*, int64_t, void*, int64_t,
                                 void*, nfp_stream) {
  return none();
}
size_t nfp_all_reduce_buffer_bytes(int32_t, size_t) { return 0; }
nfp_status nfp_all_reduce_create(nfp_gpu*, int32_t, int32_t, void* const*, size_t, nfp_all_reduce**) { return none(); }
void nfp_all_reduce_destroy(nfp_all_reduce*) {}
int64_t nfp_all_reduce_max_rows(const nfp_all_reduce*, int64_t) { return 0; }
size_t nfp_linear_norm_scratch_bytes(const nfp_linear*, int64_t) { return 0; }
nfp_status nfp_linear_run_norm(nfp_linear*, nfp_precision, nfp_type, int64_t, const void*, int64_t, const nfp_norm*,
                               void*, int64_t, const float*, int32_t, void*, nfp_stream) {
  return none();
}
nfp_status nfp_linear_describe(nfp_linear*, nfp_precision, nfp_type, int64_t, char*, size_t) { return none(); }
nfp_status nfp_gemm(nfp_gpu*, const nfp_gemm_call*, nfp_stream) { return none(); }
nfp_status nfp_rows(nfp_gpu*, const nfp_rows_call*, nfp_stream) { return none(); }
nfp_status nfp_experts_create(nfp_gpu*, int32_t, const nfp_expert_stack*, const nfp_expert_stack*, nfp_activation,
                              nfp_experts**) {
  return none();
}
void nfp_experts_destroy(nfp_experts*) {}
size_t nfp_experts_scratch_bytes(const nfp_experts*, int64_t, int32_t) { return 0; }
nfp_status nfp_experts_run(nfp_experts*, const nfp_experts_call*, nfp_stream) { return none(); }
nfp_status nfp_attention_workspace_bytes(nfp_gpu*, const nfp_attention_call*, size_t*) { return none(); }
nfp_status nfp_attention_decode(nfp_gpu*, const nfp_attention_call*, nfp_stream) { return none(); }
nfp_status nfp_attention_prefill(nfp_gpu*, const nfp_attention_call*, nfp_stream) { return none(); }
nfp_status nfp_attention_append(nfp_gpu*, const nfp_attention_call*, nfp_stream) { return none(); }

}  // extern "C"
