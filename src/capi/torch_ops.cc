// Products as operators of PyTorch (include/nestedfp_torch.h): what python/nestedfp/vllm/op.py defines, without Python
// between PyTorch's dispatcher and the kernels.
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "capi/status.h"
#include "capi/torch_shim.h"
#include "nestedfp_torch.h"

using namespace nfp::capi;
using nfp::ErrorCode;
using nfp::Result;
using nfp::Status;

namespace {

constexpr size_t kDevices = 64;
constexpr size_t kRowAlignment = 16;  // bytes: the copy engine's

struct Weight {
  nfp_linear* linear = nullptr;
  int64_t n = 0, k = 0;
  // What is held stays allocated, so that an address means one tensor.
  TorchTensor upper, lower, scale;
};
struct Bias {
  TorchTensor given;
  TorchTensor wide;  // FP32 [n], which the epilogue adds
};
struct Device {
  nfp_gpu* gpu = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  int32_t independent_start = 0;
  const nfp_all_reduce* all_reduce = nullptr;
  std::unordered_map<const void*, Weight> weights;         // by where the upper plane lies
  std::map<std::pair<const void*, int64_t>, Bias> biases;  // by where it lies and how long it is: it may be a slice
};

struct Operators {
  TorchShim torch;
  bool bound = false;
  std::atomic<int32_t> forced{-1};
  std::atomic<int64_t> threshold{1024};
  std::atomic<bool> both{false};
  std::mutex mutex;  // of the devices' tables
  std::array<Device, kDevices> devices;
};

// Never destroyed: PyTorch may be gone by then.
Operators& operators() {
  static auto* const made = new Operators;
  return *made;
}

// An operator's arguments, one after the other. Tensors among them are ours to let go.
class Arguments {
 public:
  Arguments(const TorchShim& torch, const StableValue* stack) : torch_(&torch), next_(stack) {}
  TorchTensor tensor() { return {torch_, reinterpret_cast<TensorHandle>(*next_++)}; }
  TorchTensor optional_tensor() {
    // PyTorch allocates what an optional argument holds and leaves it to us.
    auto* const held = reinterpret_cast<StableValue*>(*next_++);
    if (held == nullptr) return {};
    const StableValue value = *held;
    delete held;
    return {torch_, reinterpret_cast<TensorHandle>(value)};
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  double number() { return std::bit_cast<double>(*next_++); }
  bool flag() { return (*next_++ & 0xff) != 0; }

 private:
  const TorchShim* torch_;
  const StableValue* next_;
};

Status failed(const char* what) {
  return nfp::error(ErrorCode::kResource, "PyTorch could not {} (its message is on stderr)", what);
}
Status done_by(nfp_status code) {
  if (code == NFP_OK) return nfp::ok_status();
  return nfp::error(static_cast<ErrorCode>(static_cast<int>(code) - 1), "{}", nfp_last_error());
}

struct Rows {
  const void* data = nullptr;
  int64_t m = 0;
  int64_t ld = 0;  // elements
};

// One operator's call on one device.
class Call {
 public:
  Call(Operators& all, int32_t device, int32_t dtype) : all_(all), device_(device), dtype_(dtype) {}

  Result<TorchTensor> empty(int64_t rows, int64_t columns, int32_t dtype) {
    const std::array<int64_t, 2> sizes{rows, columns}, strides{columns, 1};
    TensorHandle made = nullptr;
    if (torch().empty_strided(2, sizes.data(), strides.data(), dtype, torch().cuda, device_, &made) != 0) {
      return nfp::error(ErrorCode::kResource, "PyTorch could not allocate {} x {} elements (its message is on stderr)",
                        rows, columns);
    }
    return TorchTensor(&torch(), made);
  }

  // PyTorch compares no devices here, and a kernel would read another one's memory.
  Status is_here(const TorchTensor& tensor, const char* what) const {
    int32_t device = 0;
    torch().get_device_index(tensor.get(), &device);
    if (device == device_) return nfp::ok_status();
    return nfp::error(ErrorCode::kUsage, "{} must be on the activations' device, cuda:{}", what, device_);
  }

  // The weight of a norm over k columns.
  Status is_norm_weight(const TorchTensor& weight, int64_t k) const {
    NFP_RETURN_IF_ERROR(is_here(weight, "the norm's weight"));
    int64_t elements = 0, dims = 0, *strides = nullptr;
    int32_t dtype = 0;
    torch().get_numel(weight.get(), &elements);
    torch().get_dim(weight.get(), &dims);
    torch().get_strides(weight.get(), &strides);
    torch().get_dtype(weight.get(), &dtype);
    if (elements == k && dtype == dtype_ && dims > 0 && strides[dims - 1] == 1) return nfp::ok_status();
    return nfp::error(ErrorCode::kUsage, "the norm's weight must be [{}] of the activations' type, without gaps", k);
  }

  // x[m, k] as the kernels can read it: rows that begin at multiples of 16 bytes. A copy, which `kept` holds, if they
  // do not; with `dense` also if they are not one behind the other.
  Result<Rows> rows(const TorchTensor& x, int64_t k, bool dense, TorchTensor* kept) {
    NFP_RETURN_IF_ERROR(is_here(x, "residual"));
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0;
    torch().get_dim(x.get(), &dims);
    torch().get_sizes(x.get(), &sizes);
    torch().get_strides(x.get(), &strides);
    torch().get_dtype(x.get(), &dtype);
    if (dims != 2 || sizes[1] != k || dtype != dtype_) {
      return nfp::error(ErrorCode::kUsage, "activations must be [m, {}], all of one type", k);
    }
    const int64_t m = sizes[0], ld = m == 1 ? k : strides[0];
    const void* const data = x.data();
    const bool aligned = reinterpret_cast<uintptr_t>(data) % kRowAlignment == 0 && ld * 2 % kRowAlignment == 0;
    if (strides[1] == 1 && ld >= k && aligned && (!dense || ld == k)) return Rows{data, m, ld};
    NFP_ASSIGN_OR_RETURN(*kept, empty(m, k, dtype_));
    if (m > 0 && torch().copy(kept->get(), x.get(), 0) != 0) return failed("copy activations").error();
    return Rows{kept->data(), m, k};
  }

  // What is added to m rows of k columns, row behind row; a copy, which `kept` holds, where it does not lie so.
  Result<const void*> residual(const TorchTensor& given, int64_t m, int64_t k, TorchTensor* kept) {
    NFP_ASSIGN_OR_RETURN(const Rows added, rows(given, k, true, kept));
    if (added.m == m) return added.data;
    return nfp::error(ErrorCode::kUsage, "x and residual have different numbers of rows");
  }

  // Made once for a weight.
  Result<nfp_linear*> linear(TorchTensor upper, TorchTensor lower, TorchTensor scale, int64_t n, int64_t k,
                             int64_t join) {
    Device& device = all_.devices[static_cast<size_t>(device_)];
    const void* const at = upper.data();
    const std::lock_guard lock(all_.mutex);
    Weight& weight = device.weights[at];
    if (weight.linear != nullptr && weight.n == n && weight.k == k) return weight.linear;
    if (device.gpu == nullptr) return no_device();
    for (const TorchTensor* const part : {&upper, &lower, &scale}) NFP_RETURN_IF_ERROR(is_here(*part, "a weight"));
    int64_t scales = 0;
    torch().get_numel(scale.get(), &scales);
    const nfp_weight planes{sizeof(nfp_weight),
                            static_cast<const uint8_t*>(at),
                            static_cast<const uint8_t*>(lower.data()),
                            scales > 0 ? static_cast<const float*>(scale.data()) : nullptr,
                            n,
                            k,
                            static_cast<nfp_join_kind>(join)};
    nfp_linear* made = nullptr;
    NFP_RETURN_IF_ERROR(
        done_by(nfp_linear_create(device.gpu, &planes, device.workspace, device.workspace_bytes, &made)));
    nfp_linear_set_independent_start(made, device.independent_start);
    nfp_linear_destroy(weight.linear);
    weight = {made, n, k, std::move(upper), std::move(lower), std::move(scale)};
    return made;
  }

  // Made in the warm-up, outside of any capture.
  Result<const float*> bias(TorchTensor given, int64_t n) {
    if (!given) return nullptr;
    const void* const at = given.data();
    NFP_RETURN_IF_ERROR(is_here(given, "bias"));
    const std::lock_guard lock(all_.mutex);
    int64_t elements = 0;
    torch().get_numel(given.get(), &elements);
    if (elements != n) return nfp::error(ErrorCode::kUsage, "the bias has {} elements, n is {}", elements, n);
    Bias& bias = all_.devices[static_cast<size_t>(device_)].biases[{at, n}];
    if (!bias.wide) {
      NFP_ASSIGN_OR_RETURN(TorchTensor wide, empty(1, n, torch().f32));
      if (torch().copy(wide.get(), given.get(), 0) != 0) return failed("convert a bias").error();
      bias = {std::move(given), std::move(wide)};
    }
    return static_cast<const float*>(bias.wide.data());
  }

  // Of the device's group; null unless `wanted`.
  Result<const nfp_all_reduce*> all_reduce(bool wanted) const {
    if (!wanted) return nullptr;
    const std::lock_guard lock(all_.mutex);
    const nfp_all_reduce* const found = all_.devices[static_cast<size_t>(device_)].all_reduce;
    if (found != nullptr) return found;
    return nfp::error(ErrorCode::kUsage, "nfp_torch_set_all_reduce({}) is missing", device_);
  }
  struct Kernels {
    nfp_gpu* gpu;
    int32_t independent_start;
  };
  Result<Kernels> kernels() const {
    const std::lock_guard lock(all_.mutex);
    const Device& device = all_.devices[static_cast<size_t>(device_)];
    if (device.gpu != nullptr) return Kernels{device.gpu, device.independent_start};
    return no_device();
  }

  nfp_precision precision(int64_t m) const {
    const int32_t forced = all_.forced.load(std::memory_order_relaxed);
    if (forced >= 0) return static_cast<nfp_precision>(forced);
    return m > all_.threshold.load(std::memory_order_relaxed) ? NFP_PRECISION_FP8 : NFP_PRECISION_FP16;
  }
  bool both() const { return all_.both.load(std::memory_order_relaxed); }
  nfp_type type() const { return dtype_ == torch().bf16 ? NFP_BF16 : NFP_F16; }
  Result<nfp_stream> stream() const {
    void* stream = nullptr;
    if (torch().current_stream(device_, &stream) != 0) return failed("name its stream").error();
    return static_cast<nfp_stream>(stream);
  }

 private:
  const TorchShim& torch() const { return all_.torch; }
  nfp::Error no_device() const { return nfp::error(ErrorCode::kUsage, "nfp_torch_set_device({}) is missing", device_); }

  Operators& all_;
  int32_t device_;
  int32_t dtype_;
};

// On which device, of which type: of the operator's first tensor.
struct Place {
  int32_t device = 0, dtype = 0;
};
Result<Place> place_of(const TorchShim& torch, const TorchTensor& x) {
  Place at;
  torch.get_device_index(x.get(), &at.device);
  torch.get_dtype(x.get(), &at.dtype);
  const bool sixteen_bits = at.dtype == torch.f16 || at.dtype == torch.bf16;
  if (at.device >= 0 && static_cast<size_t>(at.device) < kDevices && sixteen_bits) return at;
  return nfp::error(ErrorCode::kUsage, "activations must be FP16 or BF16, on a CUDA device below {}", kDevices);
}

enum class Kind { kLinear, kSwiglu, kNorm };

// y = x W^T + bias; silu(gate) * up of it; or of h = x + residual, normed, and h, where x may be a sum over ranks.
template <Kind kind>
Status run(StableValue* stack) {
  Operators& all = operators();
  Arguments arguments(all.torch, stack);
  const TorchTensor x = arguments.tensor();
  TorchTensor residual, norm_weight;
  float epsilon = 0;
  if constexpr (kind == Kind::kNorm) {
    residual = arguments.tensor();
    norm_weight = arguments.tensor();
    epsilon = static_cast<float>(arguments.number());
  }
  TorchTensor upper = arguments.tensor(), lower = arguments.tensor(), scale = arguments.tensor(), bias_given;
  if constexpr (kind != Kind::kSwiglu) bias_given = arguments.optional_tensor();
  const int64_t n = arguments.integer(), k = arguments.integer(), join = arguments.integer();
  bool swiglu = kind == Kind::kSwiglu;
  bool reduce = false;
  if constexpr (kind == Kind::kNorm) {
    swiglu = arguments.flag();
    reduce = arguments.flag();
  }

  NFP_ASSIGN_OR_RETURN(const Place at, place_of(all.torch, x));
  Call call(all, at.device, at.dtype);
  TorchTensor x_copy, residual_copy, h, scratch;
  NFP_ASSIGN_OR_RETURN(const Rows rows, call.rows(x, k, false, &x_copy));
  const int64_t columns = swiglu ? n / 2 : n;
  NFP_ASSIGN_OR_RETURN(TorchTensor y, call.empty(rows.m, columns, at.dtype));
  nfp_norm norm{sizeof(nfp_norm), nullptr, epsilon, nullptr, nullptr, k, nullptr};
  if constexpr (kind == Kind::kNorm) {
    NFP_ASSIGN_OR_RETURN(norm.residual, call.residual(residual, rows.m, k, &residual_copy));
    NFP_ASSIGN_OR_RETURN(h, call.empty(rows.m, k, at.dtype));
    NFP_RETURN_IF_ERROR(call.is_norm_weight(norm_weight, k));
    norm.weight = norm_weight.data();
    norm.h = h.data();
    NFP_ASSIGN_OR_RETURN(norm.all_reduce, call.all_reduce(reduce));
  }
  if (rows.m > 0) {
    NFP_ASSIGN_OR_RETURN(nfp_linear* const linear,
                         call.linear(std::move(upper), std::move(lower), std::move(scale), n, k, join));
    const nfp_precision precision = call.precision(rows.m);
    size_t scratch_bytes = 0;
    if constexpr (kind == Kind::kNorm) {
      scratch_bytes = nfp_linear_norm_scratch_bytes(linear, rows.m);
    } else if (precision == NFP_PRECISION_FP8 || call.both()) {
      scratch_bytes = nfp_linear_scratch_bytes(linear, rows.m);
    }
    if (scratch_bytes > 0) {
      NFP_ASSIGN_OR_RETURN(scratch, call.empty(1, static_cast<int64_t>(scratch_bytes), all.torch.u8));
    }
    void* const scratch_data = scratch ? scratch.data() : nullptr;
    NFP_ASSIGN_OR_RETURN(const float* const bias, call.bias(std::move(bias_given), n));
    NFP_ASSIGN_OR_RETURN(const nfp_stream stream, call.stream());
    const auto multiply = [&](nfp_precision in) {
      if constexpr (kind == Kind::kNorm) {
        return done_by(nfp_linear_run_norm(linear, in, call.type(), rows.m, rows.data, rows.ld, &norm, y.data(),
                                           columns, bias, swiglu ? 1 : 0, scratch_data, stream));
      } else if constexpr (kind == Kind::kSwiglu) {
        return done_by(nfp_linear_run_swiglu(linear, in, call.type(), rows.m, rows.data, rows.ld, y.data(), columns,
                                             scratch_data, stream));
      } else {
        return done_by(nfp_linear_run(linear, in, call.type(), rows.m, rows.data, rows.ld, y.data(), columns, bias,
                                      scratch_data, stream));
      }
    };
    if (call.both()) {
      NFP_RETURN_IF_ERROR(multiply(precision == NFP_PRECISION_FP8 ? NFP_PRECISION_FP16 : NFP_PRECISION_FP8));
    }
    NFP_RETURN_IF_ERROR(multiply(precision));
  }
  stack[0] = y.release();
  if constexpr (kind == Kind::kNorm) stack[1] = h.release();
  return nfp::ok_status();
}

// RMSNorm of h = x + residual, and h, where x may be a sum over ranks.
Status run_norm(StableValue* stack) {
  Operators& all = operators();
  Arguments arguments(all.torch, stack);
  const TorchTensor x = arguments.tensor(), residual = arguments.tensor(), weight = arguments.tensor();
  const auto epsilon = static_cast<float>(arguments.number());
  const bool reduce = arguments.flag();
  NFP_ASSIGN_OR_RETURN(const Place at, place_of(all.torch, x));
  Call call(all, at.device, at.dtype);
  int64_t k = 0;
  all.torch.get_numel(weight.get(), &k);
  TorchTensor x_copy, residual_copy;
  NFP_ASSIGN_OR_RETURN(const Rows rows, call.rows(x, k, false, &x_copy));
  NFP_ASSIGN_OR_RETURN(const void* const added, call.residual(residual, rows.m, k, &residual_copy));
  NFP_RETURN_IF_ERROR(call.is_norm_weight(weight, k));
  NFP_ASSIGN_OR_RETURN(TorchTensor y, call.empty(rows.m, k, at.dtype));
  NFP_ASSIGN_OR_RETURN(TorchTensor h, call.empty(rows.m, k, at.dtype));
  if (rows.m > 0) {
    NFP_ASSIGN_OR_RETURN(const Call::Kernels kernels, call.kernels());
    nfp_rows_call norm{};
    norm.size = sizeof(norm);
    norm.source = NFP_ROWS_NORM;
    norm.type = call.type();
    norm.m = rows.m;
    norm.k = norm.ldr = norm.ldy = k;
    norm.x = rows.data;
    norm.ldx = rows.ld;
    norm.weight = weight.data();
    norm.epsilon = epsilon;
    norm.independent_start = kernels.independent_start;
    norm.residual = const_cast<void*>(added);  // not written: h has its own place
    norm.h = h.data();
    norm.y = y.data();
    NFP_ASSIGN_OR_RETURN(norm.all_reduce, call.all_reduce(reduce));
    NFP_ASSIGN_OR_RETURN(const nfp_stream stream, call.stream());
    NFP_RETURN_IF_ERROR(done_by(nfp_rows(kernels.gpu, &norm, stream)));
  }
  stack[0] = y.release();
  stack[1] = h.release();
  return nfp::ok_status();
}

thread_local std::array<char, 512> failure;  // a message with its closing zero

template <Status (*body)(StableValue*)>
bool succeeds(StableValue* stack) noexcept {
  const nfp_status code = guarded([&] { return done(body(stack)); });
  if (code == NFP_OK) return true;
  std::strncpy(failure.data(), nfp_last_error(), failure.size() - 1);
  return false;
}

// PyTorch's exception comes from another C++ runtime than ours: nothing here needs to be destroyed while it passes.
template <Status (*body)(StableValue*)>
void kernel(StableValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  if (!succeeds<body>(stack)) operators().torch.check(false, "nestedfp", __FILE__, __LINE__, failure.data());
}

}  // namespace

extern "C" {

nfp_status nfp_torch_bind(const char* libtorch_cpu, const char* libtorch_cuda) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(libtorch_cpu != nullptr && libtorch_cuda != nullptr, "nfp_torch_bind: a path is null");
    Operators& all = operators();
    const std::lock_guard lock(all.mutex);
    if (all.bound) return NFP_OK;
    auto torch = TorchShim::load(libtorch_cpu, libtorch_cuda);
    if (!torch.ok()) return fail(torch.error());
    all.torch = std::move(torch).value();
    LibraryHandle library = nullptr;  // never let go: the operators end with it
    if (all.torch.library_init_impl("nestedfp", "CUDA", __FILE__, __LINE__, &library) != 0 ||
        all.torch.library_impl(library, "linear", kernel<run<Kind::kLinear>>) != 0 ||
        all.torch.library_impl(library, "swiglu", kernel<run<Kind::kSwiglu>>) != 0 ||
        all.torch.library_impl(library, "norm_linear", kernel<run<Kind::kNorm>>) != 0 ||
        all.torch.library_impl(library, "norm", kernel<run_norm>) != 0) {
      return fail(NFP_UNSUPPORTED, "PyTorch did not take nestedfp's operators (its message is on stderr)");
    }
    all.bound = true;
    return NFP_OK;
  });
}

nfp_status nfp_torch_set_device(int32_t index, nfp_gpu* gpu, void* workspace, size_t workspace_bytes,
                                int32_t independent_start) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(index >= 0 && static_cast<size_t>(index) < kDevices && gpu != nullptr && workspace != nullptr,
                     "nfp_torch_set_device: a pointer is null, or index {} is not 0 to {}", index, kDevices - 1);
    Operators& all = operators();
    const std::lock_guard lock(all.mutex);
    Device& device = all.devices[static_cast<size_t>(index)];
    device.gpu = gpu;
    device.workspace = workspace;
    device.workspace_bytes = workspace_bytes;
    device.independent_start = independent_start;
    return NFP_OK;
  });
}

nfp_status nfp_torch_set_all_reduce(int32_t index, const nfp_all_reduce* all_reduce) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(index >= 0 && static_cast<size_t>(index) < kDevices,
                     "nfp_torch_set_all_reduce: index {} is not 0 to {}", index, kDevices - 1);
    Operators& all = operators();
    const std::lock_guard lock(all.mutex);
    all.devices[static_cast<size_t>(index)].all_reduce = all_reduce;
    return NFP_OK;
  });
}

void nfp_torch_set_precision(int32_t forced, int64_t threshold) {
  operators().forced.store(forced, std::memory_order_relaxed);
  operators().threshold.store(threshold, std::memory_order_relaxed);
}

void nfp_torch_set_warm_up(int32_t both) { operators().both.store(both != 0, std::memory_order_relaxed); }

void nfp_torch_forget(int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= kDevices) return;
  Operators& all = operators();
  const std::lock_guard lock(all.mutex);
  Device& device = all.devices[static_cast<size_t>(index)];
  for (auto& [at, weight] : device.weights) nfp_linear_destroy(weight.linear);
  device.weights.clear();
  device.biases.clear();
}

nfp_status nfp_torch_refresh(int32_t index, const void* bias) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(index >= 0 && static_cast<size_t>(index) < kDevices, "nfp_torch_refresh: index {} is not 0 to {}",
                     index, kDevices - 1);
    Operators& all = operators();
    const std::lock_guard lock(all.mutex);
    for (auto& [place, held] : all.devices[static_cast<size_t>(index)].biases) {
      if ((bias != nullptr && bias != place.first) || !held.wide) continue;
      if (all.torch.copy(held.wide.get(), held.given.get(), 0) != 0) return fail(failed("convert a bias").error());
    }
    return NFP_OK;
  });
}

}  // extern "C"
