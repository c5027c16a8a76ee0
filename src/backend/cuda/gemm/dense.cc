#include "backend/cuda/gemm/dense.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <string>
#include <type_traits>
#include <utility>

namespace nfp::cuda {
namespace {

// cuBLASLt is loaded when it is first needed, so that a program with this code in it runs where there is none.
struct Library {
  decltype(&::cublasLtCreate) Create = nullptr;
  decltype(&::cublasLtDestroy) Destroy = nullptr;
  decltype(&::cublasLtGetStatusString) GetStatusString = nullptr;
  decltype(&::cublasLtMatmul) Matmul = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic = nullptr;
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy = nullptr;
  std::string failure;  // why there is none

  Library() {
    void* handle = nullptr;
    for (const char* name : {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"}) {
      if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == nullptr) {
      failure = "libcublasLt.so.13 of CUDA 13 cannot be loaded; install cuBLAS, or add its folder to LD_LIBRARY_PATH";
      return;
    }
    const auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) failure = fmt::format("libcublasLt.so.13 has no {}", name);
    };
    load(Create, "cublasLtCreate");
    load(Destroy, "cublasLtDestroy");
    load(GetStatusString, "cublasLtGetStatusString");
    load(Matmul, "cublasLtMatmul");
    load(MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    load(MatmulDescCreate, "cublasLtMatmulDescCreate");
    load(MatmulDescDestroy, "cublasLtMatmulDescDestroy");
    load(MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    load(MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    load(MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    load(MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    load(MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    load(MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  }
};

const Library& lt() {
  static const Library library;
  return library;
}

Status check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return ok_status();
  return error(ErrorCode::kResource, "cuBLASLt: {}: {}", what, lt().GetStatusString(status));
}

Result<cudaDataType_t> data_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kF8E4M3:
      return CUDA_R_8F_E4M3;
    default:
      return error(ErrorCode::kUnsupported, "cuBLASLt: no dense product in {}", name_of(dtype));
  }
}

// One row-major matrix as cuBLASLt's column-major one.
struct Layout {
  cublasLtMatrixLayout_t handle = nullptr;
  ~Layout() {
    if (handle != nullptr) lt().MatrixLayoutDestroy(handle);
  }
  Status create(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld) {
    return check(lt().MatrixLayoutCreate(&handle, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld),
                 "creating a layout");
  }
};

}  // namespace

// Shared by the plans of one problem: the descriptors; and each plan's algorithm.
struct DensePlan::State {
  struct Shared {
    cublasLtMatmulDesc_t product = nullptr;
    Layout w, x, d;
    bool fp8 = false;
    bool bias = false;
    ~Shared() {
      if (product != nullptr) lt().MatmulDescDestroy(product);
    }
  };
  std::shared_ptr<Shared> shared;
  cublasLtMatmulAlgo_t algorithm{};
};

Result<DenseGemm> DenseGemm::create() { return DenseGemm(); }

Status DenseGemm::open() const {
  if (handle_ != nullptr) return ok_status();
  if (!lt().failure.empty()) return error(ErrorCode::kUnsupported, "{}", lt().failure);
  return check(lt().Create(reinterpret_cast<cublasLtHandle_t*>(&handle_)), "creating a handle");
}
DenseGemm::~DenseGemm() {
  if (handle_ != nullptr) lt().Destroy(static_cast<cublasLtHandle_t>(handle_));
}
DenseGemm::DenseGemm(DenseGemm&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
DenseGemm& DenseGemm::operator=(DenseGemm&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

Result<std::vector<DensePlan>> DenseGemm::plans(const DenseProblem& p, int count) const {
  NFP_RETURN_IF_ERROR(open());
  NFP_ASSIGN_OR_RETURN(const cudaDataType_t in, data_type(p.input));
  NFP_ASSIGN_OR_RETURN(const cudaDataType_t out, data_type(p.output));
  auto shared = std::make_shared<DensePlan::State::Shared>();
  shared->fp8 = p.input == DType::kF8E4M3;
  NFP_RETURN_IF_ERROR(
      check(lt().MatmulDescCreate(&shared->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing the product"));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  NFP_RETURN_IF_ERROR(
      check(lt().MatmulDescSetAttribute(shared->product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)),
            "TRANSA"));
  if (shared->fp8) {
    const int8_t fast = p.fast_accumulation ? 1 : 0;
    NFP_RETURN_IF_ERROR(
        check(lt().MatmulDescSetAttribute(shared->product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast)),
              "FAST_ACCUM"));
  }
  shared->bias = p.bias;
  if (p.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    NFP_RETURN_IF_ERROR(
        check(lt().MatmulDescSetAttribute(shared->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)),
              "EPILOGUE"));
    NFP_RETURN_IF_ERROR(
        check(lt().MatmulDescSetAttribute(shared->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &out, sizeof(out)),
              "BIAS_DATA_TYPE"));
  }
  // Row-major D[m, n] is column-major n x m: W is the first operand, transposed, and X the second.
  NFP_RETURN_IF_ERROR(shared->w.create(in, p.k, p.n, p.k));
  NFP_RETURN_IF_ERROR(shared->x.create(in, p.k, p.m, p.ldx));
  NFP_RETURN_IF_ERROR(shared->d.create(out, p.n, p.m, p.ldd));

  cublasLtMatmulPreference_t preference = nullptr;
  NFP_RETURN_IF_ERROR(check(lt().MatmulPreferenceCreate(&preference), "creating a preference"));
  const size_t workspace = kWorkspaceBytes;
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(count));
  int returned = 0;
  cublasStatus_t status = lt().MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                            &workspace, sizeof(workspace));
  const auto alignment = [&](cublasLtMatmulPreferenceAttributes_t attribute, int bytes) {
    const auto value = static_cast<uint32_t>(bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = lt().MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.x_alignment);
  alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.d_alignment);
  alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.d_alignment);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt().MatmulAlgoGetHeuristic(static_cast<cublasLtHandle_t>(handle_), shared->product, shared->w.handle,
                                         shared->x.handle, shared->d.handle, shared->d.handle, preference, count,
                                         found.data(), &returned);
  }
  lt().MatmulPreferenceDestroy(preference);
  NFP_RETURN_IF_ERROR(check(status, "choosing an algorithm"));
  std::vector<DensePlan> plans;
  for (int i = 0; i < returned; ++i) {
    if (found[static_cast<size_t>(i)].state != CUBLAS_STATUS_SUCCESS) continue;
    auto state = std::make_shared<DensePlan::State>();
    state->shared = shared;
    state->algorithm = found[static_cast<size_t>(i)].algo;
    plans.emplace_back(std::move(state));
  }
  if (plans.empty()) {
    return error(ErrorCode::kUnsupported, "cuBLASLt has no algorithm for m {}, n {}, k {} in {}", p.m, p.n, p.k,
                 name_of(p.input));
  }
  return plans;
}

Status DenseGemm::run(const DensePlan& plan, const DenseCall& call, CUstream_st* stream) const {
  const auto& state = plan.state();
  auto& shared = *state.shared;
  if (shared.fp8) {
    const void* scale = call.w_scale;
    NFP_RETURN_IF_ERROR(
        check(lt().MatmulDescSetAttribute(shared.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale, sizeof(scale)),
              "A_SCALE"));
    scale = call.x_scale;
    NFP_RETURN_IF_ERROR(
        check(lt().MatmulDescSetAttribute(shared.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale, sizeof(scale)),
              "B_SCALE"));
  }
  if (shared.bias) {
    NFP_RETURN_IF_ERROR(check(
        lt().MatmulDescSetAttribute(shared.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call.bias, sizeof(call.bias)),
        "BIAS_POINTER"));
  }
  const float one = 1.0f;
  const float beta = call.residual != nullptr ? 1.0f : 0.0f;
  const void* c = call.residual != nullptr ? call.residual : call.d;
  return check(lt().Matmul(static_cast<cublasLtHandle_t>(handle_), shared.product, &one, call.w, shared.w.handle,
                           call.x, shared.x.handle, &beta, c, shared.d.handle, call.d, shared.d.handle,
                           &state.algorithm, call.workspace, kWorkspaceBytes, stream),
               "multiplying");
}

}  // namespace nfp::cuda
