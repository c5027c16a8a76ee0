// Every operation is one or two kernels on one stream; nothing waits but wait(), synchronize() and download(). Kernels
// are launched as programmatic dependents of those before them, so that one may begin, and fetch weights, while the one
// before it ends. But a step begins with two full stops, the copy of its plan and the embedding: what earlier steps
// wrote is there when the copy begins, and the plan when the embedding does. So the kernels behind may read both early.
#include "backend/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "backend/cuda/attention/attention.h"
#include "backend/cuda/context.h"
#include "backend/cuda/device_hangs.h"
#include "backend/cuda/experts/experts.h"
#include "backend/cuda/experts/grouped.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/fused/stream_norm.h"
#include "backend/cuda/gemm/dense.h"
#include "backend/cuda/gemm/plan/gemm_chooser.h"
#include "backend/cuda/linear/linear.h"
#include "backend/cuda/linear/uploader.h"
#include "backend/cuda/linear/weight.h"
#include "backend/cuda/model_shape.h"
#include "backend/cuda/profiler.h"
#include "backend/cuda/row_largest.h"
#include "backend/cuda/row_peaks.h"
#include "backend/cuda/sampling/sampling.h"
#include "backend/cuda/step/step.h"
#include "backend/operation_cost.h"
#include "base/cpu_topology.h"
#include "base/log.h"

namespace nfp {
namespace {

using cuda::CudaWeight;
using After = cuda::LinearRunner::After;

constexpr ActivationForm kForm{.feature_bytes = sizeof(uint16_t), .rounds = true};

// What a stream reports is final: an illegal access, an uncorrectable memory error or a lost device leaves the context
// unusable, and a step that a library had no memory for would fail again.
Status check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return ok_status();
  return error(ErrorCode::kDevice, "{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

// An operation's error, which names no memory or queue that might be free later, as the device's.
Status device_failure(Status status) {
  if (status.ok()) return status;
  return Error{ErrorCode::kDevice, std::move(status).error().message};
}

// Of a device that this backend or another one of the process has found to hang: what it computes may never be there.
Status hangs() { return error(ErrorCode::kDevice, "the GPU hangs: a step before has not finished in time"); }

class CudaEvent final : public Event {
 public:
  ~CudaEvent() override { cudaEventDestroy(event); }
  cudaEvent_t event = nullptr;
  Buffer overflowed_layer;  // host: i32, as the work before the event left it
};

class CudaGraph final : public Graph {
 public:
  ~CudaGraph() override {
    if (!cuda::device_hangs()) cudaGraphExecDestroy(executable);
  }
  size_t bytes() const override { return taken; }
  cudaGraphExec_t executable = nullptr;
  size_t taken = 0;
};

class CudaKvCache final : public KvCache {
 public:
  CudaKvCache(const KvCacheSpec& spec, Buffer memory) : spec_(spec), memory_(std::move(memory)) {}
  const KvCacheSpec& spec() const override { return spec_; }
  size_t bytes() const override { return memory_.bytes(); }

  static size_t block_bytes(const KvCacheSpec& spec) {  // keys or values of one layer
    return static_cast<size_t>(spec.kv_heads) * static_cast<size_t>(spec.block_size) *
           static_cast<size_t>(spec.head_dim) * size_of(spec.dtype);
  }
  // A layer is [blocks, keys and values, kv_heads, block_size, head_dim]: what decode reads together, its heads' keys
  // and values of the same tokens, is in one place of memory (docs/attention.md, "Decode").
  cuda::PagedKv layer(int index) const {
    char* const keys =
        memory_.as<char>() + static_cast<size_t>(index) * static_cast<size_t>(spec_.blocks) * 2 * block_bytes(spec_);
    return {.keys = keys,
            .values = keys + block_bytes(spec_),
            .type = spec_.dtype == DType::kF8E4M3 ? cuda::KvType::kE4m3 : cuda::KvType::kF16,
            .blocks = spec_.blocks,
            .block_size = spec_.block_size,
            .block_stride = int64_t{2} * spec_.kv_heads * spec_.block_size * spec_.head_dim};
  }

 private:
  KvCacheSpec spec_;
  Buffer memory_;
};

class CudaTokenHistory final : public TokenHistory {
 public:
  int32_t slots() const override { return counts.slots; }
  cuda::TokenCounts counts;
  Buffer memory;
  Buffer staging;  // i32, for resets
  Buffer counter;  // u32
};

// Blocks of some kernels wait for others of the same launch (gemm/kernel/parts.cuh, attention/decode_exchange.cuh),
// which all find room where a device runs one step at a time. Of two steps at once either may have room that the
// other's blocks wait for, and none would end. So the backends of the process that are on one device take turns.
struct Turns {
  std::mutex mutex;            // of whoever enqueues
  const void* last = nullptr;  // the backend that had a turn last, and on its stream what it has enqueued
  cudaEvent_t enqueued = nullptr;
};
Turns& turns_on(int device) {
  static std::array<Turns, 32> turns;  // devices beyond share some, which costs time alone
  return turns[static_cast<size_t>(device) % turns.size()];
}

class CudaBackend final : public Backend, public cuda::GemmChooser {
 public:
  static Result<std::unique_ptr<Backend>> create(const CudaOptions& options);
  ~CudaBackend() override {
    if (!finish_stream()) return;
    if (turns_ != nullptr) {
      const std::lock_guard lock(turns_->mutex);
      if (turns_->last == this) turns_->last = nullptr;
    }
    if (enqueued_ != nullptr) cudaEventDestroy(enqueued_);
    uploader_.reset();
    for (Buffer* buffer : {&gemm_workspace_, &dense_workspace_, &scratch_, &attention_workspace_, &peaks_,
                           &overflow_mark_, &synchronized_layer_, &rounded_, &plans_[0].memory, &plans_[1].memory})
      buffer->reset();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  const BackendInfo& info() const override { return info_; }
  bool supports(Precision) const override { return true; }
  Precision fastest_fp8() const override { return kFp8OnGpu; }
  bool prefers_graphs() const override { return true; }
  int32_t launch_context(const KvCache& cache, int32_t sequences, int32_t longest) const override;
  int32_t default_step_tokens() const override { return 8192; }  // an 8B model computes them in a fifth of a second
  int32_t default_sequences() const override { return 256; }     // a step of so many makes twice the tokens/s of 64
  std::shared_ptr<void> enter() override { return context_.enter(); }
  std::shared_ptr<void> turn() override { return std::make_shared<Turn>(*this); }
  const cuda::DeviceShape& gemm_device() const override { return linear_->gemm().device(); }
  const cuda::TuningTable& gemm_choices() const override { return choices_; }
  void set_gemm_choices(const cuda::TuningTable& table) override {
    choices_ = table;
    linear_->forget_choices();
  }
  Status reserve(const StepReserve& most) override;
  std::optional<DeviceMemory> memory() const override {
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) return std::nullopt;
    return DeviceMemory{total, free, others_};
  }

  Result<Buffer> allocate(size_t bytes) override;
  Result<Buffer> allocate_host(size_t bytes) override;
  void free(void* data, size_t bytes) override;
  Status upload(void* dst, const void* src, size_t bytes) override {
    if (bytes == 0) return ok_status();
    return check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, stream_), "copying to the device");
  }
  Status download(void* dst, const void* src, size_t bytes) override {
    if (bytes > 0) {
      NFP_RETURN_IF_ERROR(
          check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the device"));
    }
    return synchronize();
  }
  Status synchronize() override {
    if (cuda::device_hangs()) {
      keep(hangs());
      return *failure_;
    }
    keep(cuda::run_take_mark({overflow_mark_.as<int32_t>(), synchronized_layer_.as<int32_t>()}, stream_));
    keep(wait_at_most([this] { return cudaStreamQuery(stream_); }));
    return failure_of(synchronized_layer_);
  }
  void copy(const CopyArgs& args) override { copy_all({&args, 1}); }
  void copy_all(std::span<const CopyArgs> all) override;
  Result<std::unique_ptr<Event>> make_event() override;
  void record(Event& event) override {
    auto& own = static_cast<CudaEvent&>(event);
    keep(cuda::run_take_mark({overflow_mark_.as<int32_t>(), own.overflowed_layer.as<int32_t>()}, stream_));
    keep(check(cudaEventRecord(own.event, stream_), "recording an event"));
  }
  Status wait(Event& event) override {
    auto& own = static_cast<CudaEvent&>(event);
    keep(wait_at_most([&own] { return cudaEventQuery(own.event); }));
    return failure_of(own.overflowed_layer);
  }

  DType activation_dtype() const override { return DType::kF16; }
  size_t activation_bytes(int64_t rows, int64_t features) const override {
    return cuda::activation_bytes(rows, features);
  }

  Result<std::unique_ptr<LinearWeight>> make_linear(const LinearSpec& spec) override;
  Result<std::unique_ptr<KvCache>> make_kv_cache(const KvCacheSpec& spec) override;
  size_t kv_bytes_per_block(const KvCacheSpec& spec) const override {
    return 2 * static_cast<size_t>(spec.layers) * CudaKvCache::block_bytes(spec);
  }
  Result<std::unique_ptr<TokenHistory>> make_token_history(int32_t slots, int32_t vocab) override;
  Status reset_history(TokenHistory& history, int32_t slot, std::span<const int32_t> prompt,
                       std::span<const int32_t> output) override;

  void embed(const EmbedArgs& args) override;
  void rms_norm(const RmsNormArgs& args) override;
  void linear(const LinearArgs& args) override { multiply(args, false); }
  void linear_sample(const LinearArgs& first, const SampleArgs& then) override;
  void rope(const RopeArgs& args) override;
  void attention(const AttentionArgs& args) override { attend(attention_call(args), args); }
  void rope_attention(const RopeArgs& first, const AttentionArgs& then) override;
  void route(const RouteArgs& args) override;
  void expert_linear(const ExpertLinearArgs& args) override;
  void combine_experts(const CombineExpertsArgs& args) override;
  void combine_rms_norm(const CombineExpertsArgs& first, const RmsNormArgs& then) override;
  void gather_rows(const GatherRowsArgs& args) override;
  void sample(const SampleArgs& args) override;
  void score(const ScoreArgs& args) override;

  Status begin_capture() override {
    return check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a step");
  }
  Result<std::unique_ptr<Graph>> end_capture() override;
  Status replay(Graph& graph) override {
    return check(cudaGraphLaunch(static_cast<CudaGraph&>(graph).executable, stream_), "replaying a step");
  }

  void set_profiling(bool on) override {
    if (!finish_stream()) return keep(hangs());
    profiler_.reset(on);
    lengths_ = {};
  }
  bool profiling() const override { return profiler_.on(); }
  std::vector<StageTime> profile() const override { return profiler_.times(); }

 private:
  explicit CudaBackend(const CudaOptions& options) : options_(options) {}
  class Turn {
   public:
    explicit Turn(CudaBackend& own) : own_(own), turns_(*own.turns_), lock_(turns_.mutex) {
      if (turns_.last != nullptr && turns_.last != &own)
        own.keep(check(cudaStreamWaitEvent(own.stream_, turns_.enqueued, 0), "waiting for another engine's step"));
      turns_.last = &own;
      turns_.enqueued = own.enqueued_;
    }
    ~Turn() { own_.keep(check(cudaEventRecord(own_.enqueued_, own_.stream_), "recording an event")); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    CudaBackend& own_;
    Turns& turns_;
    const std::lock_guard<std::mutex> lock_;
  };
  // The first failure of an operation, for whoever waits next.
  void keep(Status status) {
    if (!status.ok() && !failure_) failure_ = device_failure(std::move(status)).error();
  }
  // See cuda::wait_at_most.
  template <class Query>
  Status wait_at_most(Query query) const;
  // Waits for all that is enqueued. false = the device hangs, and nothing of it can be freed.
  bool finish_stream() const {
    return cuda::wait_at_most(options_.hang_s, [this] { return cudaStreamQuery(stream_); }).has_value();
  }
  // Of work whose overflow mark came to `layer`.
  Status failure_of(const Buffer& layer) const {
    if (failure_) return *failure_;  // stays: a device that failed once does not come back
    if (*layer.as<int32_t>() < 0) return ok_status();
    return error(ErrorCode::kUnsupported,
                 "layer {}: a query, key or value is beyond FP16's range (65504); run the model with --device cpu and "
                 "--dtype-kv f32",
                 *layer.as<int32_t>());
  }
  Result<Buffer> adopt(cudaError_t status, void* data, size_t bytes, bool host);
  cuda::GemmInputCall norm_call(const RmsNormArgs& args) const;
  cuda::AttentionCall attention_call(const AttentionArgs& args) const;
  // `call` is attention_call(args), or that with the rotation of `rotated`, where all sequences are decoded and none
  // was rotated.
  static bool is_decode(const BatchView& batch) {
    return batch.single > 0 && batch.single == batch.sequences && !batch.narrowed && !batch.fresh_keys;
  }
  void plan_attention(const BatchView& batch);
  const void* plan_of(const cuda::AttentionCall& call, const BatchView& batch);  // null = none
  void attend(cuda::AttentionCall call, const AttentionArgs& args, const std::optional<RopeArgs>& rotated = {});
  // finds_largest: LinearCall::y_is_largest in place of args.y_is_f32.
  void multiply(const LinearArgs& args, bool finds_largest);
  // RMSNorm of `count` heads together, in place.
  void norm_heads(const RopeArgs& args, int32_t first, int32_t count, const float* weight);
  // Rounds FP16 rows to E4M3 with a scale each.
  // `routes`: each row to its assignments' places.
  void round(const void* x, int64_t rows, int64_t features, void* out, const ExpertRoutes* routes = nullptr);

  const CudaOptions options_;
  BackendInfo info_;
  cuda::Context context_;
  cudaStream_t stream_ = nullptr;
  Turns* turns_ = nullptr;
  cudaEvent_t enqueued_ = nullptr;  // Turns::enqueued
  cuda::TuningTable choices_;       // outliving linear_
  std::optional<cuda::LinearRunner> linear_;
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<cuda::DeviceUploader> uploader_;  // while weights are loaded
  std::unordered_map<void*, bool> buffers_;         // is it the host's?
  int64_t widest_ = 0;                              // features of any weight's inputs
  int64_t widest_gated_ = 0;                        // rows of any interleaved weight
  int32_t heads_ = 0;                               // of the model's attention
  Buffer gemm_workspace_, dense_workspace_, scratch_, attention_workspace_, peaks_;
  // What decode calls of a step with the same window need to know of its batch.
  struct AttentionPlan {
    std::optional<cuda::AttentionCall> call;  // such a call; none = not in use
    Buffer memory;
    bool is_ready = false;  // of the step that is being enqueued
  };
  std::array<AttentionPlan, 2> plans_;     // of the windows that a model's layers have
  std::array<int32_t, 2> most_rotated_{};  // by KvType: decoded sequences that attention rotates by itself
  // i32: a layer whose queries, keys or values left FP16, else -1. Kernels write the first, on the device; what it was
  // when the work before an event was done is that event's, as two steps are in flight.
  Buffer overflow_mark_, synchronized_layer_;
  Buffer rounded_;                            // inputs that came in no linear's form, where there are such
  std::vector<cuda::ExpertMatrix> matrices_;  // of a call
  const void* in_order_ = nullptr;            // where the last route() left its x by assignment
  cuda::Profiler profiler_;
  SequenceLengths lengths_;  // of the step, while its times are taken
  std::optional<Error> failure_;
  uint64_t others_ = 0;  // DeviceMemory::others
};

const CudaWeight& device_weight(const LinearWeight* weight) { return static_cast<const CudaWeight&>(*weight); }

Result<std::unique_ptr<Backend>> CudaBackend::create(const CudaOptions& options) {
  std::unique_ptr<CudaBackend> backend(new CudaBackend(options));
  if (!options.gemm_choices.empty()) {
    NFP_ASSIGN_OR_RETURN(backend->choices_, cuda::TuningTable::load(options.gemm_choices));
  }
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) return error(ErrorCode::kUnsupported, "no NVIDIA driver is here (libcuda.so.1); use --device cpu");
    return error(
        ErrorCode::kUnsupported,
        "the NVIDIA driver is too old: it supports CUDA {}.{}, and this program needs {}.{}; update the driver "
        "or use --device cpu",
        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  if (found != cudaSuccess || count == 0) {
    return error(ErrorCode::kUnsupported, "there is no usable NVIDIA GPU ({}); use --device cpu",
                 found == cudaSuccess ? "none is visible" : cudaGetErrorString(found));
  }
  int device = 0;  // a library's caller may have chosen another
  NFP_RETURN_IF_ERROR(check(cudaGetDevice(&device), "choosing a GPU"));
  cudaDeviceProp properties{};
  NFP_RETURN_IF_ERROR(check(cudaGetDeviceProperties(&properties, device), "reading the GPU's properties"));
  cuda::TuningTable& choices = backend->choices_;
  if (!options.gemm_choices.empty() && choices.device != properties.name) {
    log::warn("{}: its kernels were timed on '{}', this is '{}'; make it again with 'nestedfp tune'",
              options.gemm_choices, choices.device, properties.name);
  }
  choices.device = properties.name;
  if (const auto* known = cuda::built_in_table(properties.name, properties.multiProcessorCount); known != nullptr)
    choices.fill_from(*known);
  NFP_ASSIGN_OR_RETURN(cuda::LinearRunner runner, cuda::LinearRunner::create(&choices));
  backend->linear_.emplace(std::move(runner));
  NFP_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&backend->stream_, cudaStreamNonBlocking), "making a stream"));
  NFP_RETURN_IF_ERROR(check(cudaEventCreateWithFlags(&backend->enqueued_, cudaEventDisableTiming), "making an event"));
  backend->turns_ = &turns_on(device);
  if (const auto now = backend->memory()) backend->others_ = now->total - now->free;
  backend->context_ = cuda::Context::current();
  const int threads = options.threads > 0 ? options.threads : std::max(1, usable_cpu_count());
  backend->threads_ = std::make_unique<ThreadPool>(std::max(1, threads));
  NFP_ASSIGN_OR_RETURN(backend->gemm_workspace_, backend->allocate(cuda::Workspace::kBytes));
  NFP_ASSIGN_OR_RETURN(backend->dense_workspace_, backend->allocate(cuda::DenseGemm::kWorkspaceBytes));
  NFP_ASSIGN_OR_RETURN(backend->peaks_, backend->allocate(cuda::RowPeaks::kBytes));
  NFP_ASSIGN_OR_RETURN(backend->overflow_mark_, backend->allocate(sizeof(int32_t)));
  NFP_ASSIGN_OR_RETURN(backend->synchronized_layer_, backend->allocate_host(sizeof(int32_t)));
  NFP_RETURN_IF_ERROR(check(cudaMemsetAsync(backend->overflow_mark_.data(), 0xff, sizeof(int32_t), backend->stream_),
                            "setting memory"));
  backend->info_ = {
      "cuda",
      fmt::format("{}, {:.0f} GiB{}", properties.name, static_cast<double>(properties.totalGlobalMem) / double{1 << 30},
                  options.deterministic ? ", deterministic" : ""),
      "sm_90a", std::max(1, threads)};
  return std::unique_ptr<Backend>(std::move(backend));
}

// ---- memory --------------------------------------------------------------------------------------------------------

Result<Buffer> CudaBackend::adopt(cudaError_t status, void* data, size_t bytes, bool host) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    const auto left = memory();
    return error(
        ErrorCode::kResource, "cannot take {:.2f} GiB of {} memory: {}{}", static_cast<double>(bytes) / double{1 << 30},
        host ? "page-locked host" : "GPU", cudaGetErrorString(status),
        !host && left ? fmt::format(" ({:.2f} GiB are free)", static_cast<double>(left->free) / double{1 << 30}) : "");
  }
  buffers_.emplace(data, host);
  return Buffer(this, data, bytes);
}

Result<Buffer> CudaBackend::allocate(size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, std::max<size_t>(bytes, 16));
  NFP_ASSIGN_OR_RETURN(Buffer buffer, adopt(status, data, bytes, false));
  NFP_RETURN_IF_ERROR(check(cudaMemsetAsync(data, 0, bytes, stream_), "clearing memory"));
  return buffer;
}

Result<Buffer> CudaBackend::allocate_host(size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaHostAlloc(&data, std::max<size_t>(bytes, 16), cudaHostAllocDefault);
  NFP_ASSIGN_OR_RETURN(Buffer buffer, adopt(status, data, bytes, true));
  std::fill_n(static_cast<char*>(data), bytes, '\0');
  return buffer;
}

void CudaBackend::free(void* data, size_t) {
  const auto place = buffers_.find(data);
  assert(place != buffers_.end());
  if (!finish_stream()) return;
  if (place->second) {
    cudaFreeHost(data);
  } else {
    cudaFree(data);
  }
  buffers_.erase(place);
}

void CudaBackend::copy_all(std::span<const CopyArgs> all) {
  for (AttentionPlan& plan : plans_) plan.is_ready = false;  // these may be another batch's arrays
  // One kernel takes less time than the copy engine's start, which each copy would wait for.
  cuda::CopyCall call;
  OperationCost cost;
  bool few = all.size() <= cuda::CopyCall::kMostPieces;
  for (const CopyArgs& args : all) {
    if (args.bytes == 0 || args.rows == 0) continue;
    cost.activation_bytes += cost_of(args).activation_bytes;
    const auto bytes = static_cast<int64_t>(args.bytes);
    few = few && bytes <= cuda::CopyCall::kMostBytes / args.rows && bytes % 4 == 0;
    if (!few) continue;
    call.piece[call.pieces++] = {args.src,
                                 args.dst,
                                 bytes,
                                 args.rows,
                                 static_cast<int64_t>(args.src_pitch),
                                 static_cast<int64_t>(args.dst_pitch)};
  }
  if (cost.activation_bytes == 0) return;
  const auto timed = profiler_.time(stage::kCopy, stream_, [cost] { return cost; });
  if (few) {
    keep(cuda::run_copy(call, stream_));
    return;
  }
  for (const CopyArgs& args : all) {
    if (args.bytes == 0 || args.rows == 0) continue;
    const cudaError_t status = args.rows == 1
                                   ? cudaMemcpyAsync(args.dst, args.src, args.bytes, cudaMemcpyDefault, stream_)
                                   : cudaMemcpy2DAsync(args.dst, args.dst_pitch, args.src, args.src_pitch, args.bytes,
                                                       static_cast<size_t>(args.rows), cudaMemcpyDefault, stream_);
    keep(check(status, "copying"));
  }
}

template <class Query>
Status CudaBackend::wait_at_most(Query query) const {
  if (cuda::device_hangs()) return hangs();
  if (const auto status = cuda::wait_at_most(options_.hang_s, query)) return check(*status, "waiting for the device");
  return error(ErrorCode::kDevice, "the GPU has not finished a step within {:g} s: it hangs", options_.hang_s);
}

Result<std::unique_ptr<Event>> CudaBackend::make_event() {
  auto event = std::make_unique<CudaEvent>();
  NFP_RETURN_IF_ERROR(check(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming), "making an event"));
  NFP_ASSIGN_OR_RETURN(event->overflowed_layer, allocate_host(sizeof(int32_t)));
  *event->overflowed_layer.as<int32_t>() = -1;
  return std::unique_ptr<Event>(std::move(event));
}

Status CudaBackend::reserve(const StepReserve& most) {
  if (uploader_) {
    NFP_RETURN_IF_ERROR(uploader_->finish());
    uploader_.reset();
  }
  NFP_RETURN_IF_ERROR(cuda::check_model_shape(most));
  const int64_t rows = std::max(most.tokens, most.sequences);
  const size_t width = static_cast<size_t>(std::max(widest_, widest_gated_)) * sizeof(uint16_t);
  const size_t bytes = cuda::align_activation(static_cast<size_t>(rows) * width);
  if (scratch_.bytes() < bytes) {
    scratch_.reset();
    NFP_ASSIGN_OR_RETURN(scratch_, allocate(bytes));
  }
  if (most.experts > 0 || most.plain_inputs) {
    size_t rounded = cuda::activation_bytes(rows, widest_);
    if (!options_.deterministic) {  // what goes between an expert's matrices, as codes and scales
      const int64_t assignments = rows * most.top_experts;
      rounded = std::max(rounded, cuda::e4m3_scale_offset(assignments, most.expert_width) +
                                      static_cast<size_t>(assignments) * sizeof(float));
    }
    if (rounded_.bytes() < rounded) {
      rounded_.reset();
      NFP_ASSIGN_OR_RETURN(rounded_, allocate(rounded));
    }
    matrices_.resize(static_cast<size_t>(most.experts));
  }
  cuda::AttentionCall call;
  call.heads = most.heads;
  call.kv_heads = most.kv_heads;
  call.head_dim = most.head_dim;
  call.sequences = most.sequences;
  call.deterministic = options_.deterministic;
  heads_ = most.heads;
  size_t attention = 0, plan_bytes = 0;
  for (const cuda::KvType type : {cuda::KvType::kF16, cuda::KvType::kE4m3}) {  // the cache comes later
    call.cache.type = type;
    NFP_ASSIGN_OR_RETURN(cuda::DecodeNeeds needs, cuda::decode_needs(call));
    if (options_.deterministic) needs = {cuda::kPrefillWorkspaceBytes, 0};  // see attend()
    attention = std::max(attention, needs.workspace_bytes);
    plan_bytes = std::max(plan_bytes, needs.plan_bytes);
    most_rotated_[static_cast<size_t>(type)] = needs.most_rotated;
  }
  if (attention_workspace_.bytes() < attention) {
    attention_workspace_.reset();
    NFP_ASSIGN_OR_RETURN(attention_workspace_, allocate(attention));
  }
  for (AttentionPlan& plan : plans_) {
    plan.call.reset();
    plan.is_ready = false;
    if (plan.memory.bytes() >= plan_bytes) continue;
    plan.memory.reset();
    NFP_ASSIGN_OR_RETURN(plan.memory, allocate(plan_bytes));
  }
  return synchronize();
}

// ---- weights, cache, history ---------------------------------------------------------------------------------------

Result<std::unique_ptr<LinearWeight>> CudaBackend::make_linear(const LinearSpec& spec) {
  if (!uploader_) {
    NFP_ASSIGN_OR_RETURN(uploader_, cuda::DeviceUploader::create(options_.hang_s));
  }
  NFP_ASSIGN_OR_RETURN(auto weight, CudaWeight::make(spec, *uploader_, *threads_));
  if (weight->k() > cuda::kMaxColumns) {
    return error(ErrorCode::kUnsupported,
                 "{}: has {} inputs, and the GPU backend rounds rows of at most {} to E4M3; use --device cpu",
                 spec.parts.front()->name(), weight->k(), cuda::kMaxColumns);
  }
  widest_ = std::max(widest_, weight->k());
  if (weight->interleaved()) widest_gated_ = std::max(widest_gated_, weight->n());
  return std::unique_ptr<LinearWeight>(std::move(weight));
}

Result<std::unique_ptr<KvCache>> CudaBackend::make_kv_cache(const KvCacheSpec& spec) {
  if (spec.dtype != DType::kF16 && spec.dtype != DType::kF8E4M3) {
    return error(ErrorCode::kUnsupported, "the KV cache on a GPU is FP16 or E4M3 (--dtype-kv f16 or fp8), not {}",
                 name_of(spec.dtype));
  }
  if (spec.block_size != 16 && spec.block_size != 32 && spec.block_size != 64) {
    return error(ErrorCode::kUnsupported, "KV blocks on a GPU have 16, 32 or 64 tokens, not {}", spec.block_size);
  }
  NFP_ASSIGN_OR_RETURN(Buffer memory, allocate(kv_bytes_per_block(spec) * static_cast<size_t>(spec.blocks)));
  return std::unique_ptr<KvCache>(std::make_unique<CudaKvCache>(spec, std::move(memory)));
}

Result<std::unique_ptr<TokenHistory>> CudaBackend::make_token_history(int32_t slots, int32_t vocab) {
  if (vocab > cuda::kMaxVocab) {
    return error(ErrorCode::kUnsupported,
                 "a vocabulary of {} tokens, and the GPU backend samples from at most {}; use --device cpu", vocab,
                 cuda::kMaxVocab);
  }
  auto history = std::make_unique<CudaTokenHistory>();
  NFP_ASSIGN_OR_RETURN(history->memory,
                       allocate(static_cast<size_t>(slots) * static_cast<size_t>(vocab) * sizeof(uint32_t)));
  NFP_ASSIGN_OR_RETURN(history->counter, allocate(sizeof(uint32_t)));
  history->counts = {history->memory.as<uint32_t>(), slots, vocab};
  return std::unique_ptr<TokenHistory>(std::move(history));
}

Status CudaBackend::reset_history(TokenHistory& history, int32_t slot, std::span<const int32_t> prompt,
                                  std::span<const int32_t> output) {
  auto& own = static_cast<CudaTokenHistory&>(history);
  const size_t bytes = (prompt.size() + output.size()) * sizeof(int32_t);
  if (own.staging.bytes() < bytes) {
    NFP_ASSIGN_OR_RETURN(own.staging, allocate(std::max<size_t>(bytes, size_t{64} << 10)));
  }
  return device_failure(cuda::reset_history(own.counts, slot, prompt, output, own.staging.as<int32_t>(), stream_));
}

// ---- operations ----------------------------------------------------------------------------------------------------

void CudaBackend::embed(const EmbedArgs& args) {
  const BatchView& batch = args.batch;
  lengths_ = {profiler_.keep(batch.query_start, static_cast<size_t>(batch.sequences) + 1, stream_),
              profiler_.keep(batch.context, static_cast<size_t>(batch.sequences), stream_)};
  const auto timed = profiler_.time(stage::kEmbed, stream_, [args] { return cost_of(args, kForm); });
  plan_attention(batch);
  const CudaWeight& table = device_weight(args.table);
  const cuda::WeightSegment& segment = table.segments().front();
  cuda::EmbeddingTable from{.vocab = table.n(), .hidden = table.k()};
  if (segment.nested) {
    from.upper = segment.matrix.upper;
    from.lower = segment.matrix.lower;
    from.join = segment.matrix.join;
    from.row_scale = segment.matrix.row_scale;
  } else {
    from.dense = segment.dense;
  }
  keep(cuda::run_embed({.table = from,
                        .tokens = {batch.token_ids, batch.token_source, batch.previous},
                        .rows = batch.tokens,
                        .scale = args.scale,
                        .out = args.out,
                        .out_is_f32 = args.out_is_f32,
                        .dependent_launch = false},
                       stream_));
}

void CudaBackend::round(const void* x, int64_t rows, int64_t features, void* out, const ExpertRoutes* routes) {
  const int32_t copies = routes != nullptr ? routes->top : 1;
  const auto timed =
      profiler_.time(stage::kRound, stream_, [=] { return rounding_cost(rows, features, kForm, copies); });
  keep(cuda::prepare_gemm_input({.m = rows,
                                 .k = features,
                                 .x = x,
                                 .ldx = features,
                                 .y_e4m3 = static_cast<uint8_t*>(out),
                                 .ldy_e4m3 = cuda::e4m3_row_bytes(features),
                                 .scales = cuda::e4m3_scales(out, rows * copies, features),
                                 .place = routes != nullptr ? routes->place : nullptr,
                                 .copies = routes != nullptr ? copies : 0},
                                stream_));
}

void CudaBackend::rms_norm(const RmsNormArgs& args) {
  const auto timed = profiler_.time(stage_of(args, kForm), stream_, [args] { return cost_of(args, kForm); });
  if (args.x_is_f32) {
    const bool exact = is_exact(args.consumer);
    cuda::StreamNormCall call{.rows = args.rows,
                              .columns = args.hidden,
                              .x = static_cast<const float*>(args.x),
                              .residual = static_cast<float*>(args.residual),
                              .weight = args.weight,
                              .epsilon = args.eps};
    if (args.out_is_f32) {
      call.y_f32 = static_cast<float*>(args.out);
    } else {
      call.y_f16 = exact ? static_cast<uint16_t*>(args.out) : nullptr;
      call.y_e4m3 = exact ? nullptr : static_cast<uint8_t*>(args.out);
      call.scales = exact ? nullptr : cuda::e4m3_scales(args.out, args.rows, args.hidden);
    }
    keep(cuda::run_stream_norm(call, stream_));
    return;
  }
  if (args.out == nullptr) {
    keep(cuda::run_add({.x = args.x, .residual = args.residual, .count = int64_t{args.rows} * args.hidden}, stream_));
    return;
  }
  keep(cuda::prepare_gemm_input(norm_call(args), stream_));
}

cuda::GemmInputCall CudaBackend::norm_call(const RmsNormArgs& args) const {
  const bool exact = is_exact(args.consumer);
  return {.source = cuda::GemmInputCall::Source::kNorm,
          .m = args.rows,
          .k = args.hidden,
          .x = args.x,
          .ldx = args.hidden,
          .weight = args.weight,
          .weight_f32 = true,
          .epsilon = args.eps,
          .residual = args.residual,
          .ldr = args.hidden,
          .y_f16 = exact ? args.out : nullptr,
          .ldy = args.hidden,
          .y_e4m3 = exact ? nullptr : static_cast<uint8_t*>(args.out),
          .ldy_e4m3 = cuda::e4m3_row_bytes(args.hidden),
          .scales = exact ? nullptr : cuda::e4m3_scales(args.out, args.rows, args.hidden),
          .batch_invariant = options_.deterministic};
}

void CudaBackend::multiply(const LinearArgs& args, bool finds_largest) {
  const CudaWeight& weight = device_weight(args.weight);
  const void* x = args.x;
  if (args.x_is_plain && !is_exact(weight.consumes(args.precision))) {
    round(x, args.rows, weight.k(), rounded_.data());
    x = rounded_.data();
  }
  const cuda::LinearEpilogue epilogue = args.epilogue != Epilogue::kGatedActivation ? cuda::LinearEpilogue::kStore
                                        : args.activation == Activation::kSilu      ? cuda::LinearEpilogue::kSwiglu
                                                                                    : cuda::LinearEpilogue::kGeglu;
  LinearArgs product = args;  // what the first kernel does of it
  const auto after = cuda::LinearRunner::after(weight, epilogue, args.consumer);
  if (after != After::kNothing) product.consumer = Precision::kFp16;
  if (after == After::kActivation || after == After::kActivationRound) product.epilogue = Epilogue::kStore;
  const auto largest_bytes =
      finds_largest ? std::optional<uint64_t>(cuda::RowLargest::row_bytes(args.rows, weight.n())) : std::nullopt;
  auto timed = profiler_.time(
      args.stage, stream_, [product, largest_bytes] { return cost_of(product, kForm, largest_bytes); },
      product_precision(weight, args.precision));
  cudaEvent_t multiplied = nullptr;
  if (after == After::kRound) {
    multiplied = timed.then(
        stage::kRound, [rows = args.rows, features = weight.n() / 2] { return rounding_cost(rows, features, kForm); });
  } else if (after != After::kNothing) {
    multiplied = timed.then(
        after == After::kActivation ? stage::kActivation : stage::kActivationRound,
        [rows = args.rows, n = weight.n(), consumer = args.consumer] { return gating_cost(rows, n, consumer, kForm); });
  }
  const cuda::LinearCall call{
      .x = x,
      .rows = args.rows,
      .reserved_rows = args.rows,  // who writes E4M3 rows and who reads them agree on the number
      .precision = args.precision,
      .epilogue = epilogue,
      .consumer = args.consumer,
      .y = args.y,
      .y_is_f32 = args.y_is_f32 && !finds_largest,
      .y_is_largest = finds_largest,
      .reduction = options_.deterministic ? cuda::Reduction::kBatchInvariant : cuda::Reduction::kFastest,
      .multiplied = multiplied,
      .workspace = {.gemm = {gemm_workspace_.data(), gemm_workspace_.bytes()},
                    .dense = dense_workspace_.data(),
                    .scratch = scratch_.data(),
                    .scratch_bytes = scratch_.bytes(),
                    .peaks = peaks_.as<uint32_t>()},
      .stream = stream_};
  keep(linear_->run(weight, call));
  if (args.soft_cap <= 0) return;
  assert(args.y_is_f32);
  keep(cuda::run_soft_cap({static_cast<float*>(args.y), args.rows * weight.n(), args.soft_cap}, stream_));
}

void CudaBackend::norm_heads(const RopeArgs& args, int32_t first, int32_t count, const float* weight) {
  uint16_t* const x = static_cast<uint16_t*>(args.qkv) + int64_t{first} * args.head_dim;
  const int64_t pitch = int64_t{args.heads + 2 * args.kv_heads} * args.head_dim;
  keep(cuda::prepare_gemm_input({.source = cuda::GemmInputCall::Source::kNorm,
                                 .m = args.batch.tokens,
                                 .k = int64_t{count} * args.head_dim,
                                 .x = x,
                                 .ldx = pitch,
                                 .weight = weight,
                                 .weight_f32 = true,
                                 .epsilon = args.norm_eps,
                                 .y_f16 = x,
                                 .ldy = pitch,
                                 .batch_invariant = options_.deterministic},
                                stream_));
}

void CudaBackend::rope(const RopeArgs& args) {
  const auto timed = profiler_.time(stage::kRope, stream_, [args] { return cost_of(args, kForm); });
  const cuda::PagedKv cache = static_cast<const CudaKvCache&>(*args.cache).layer(args.layer);
  if (args.norm_spans_heads) {  // in place, by kernels of their own
    norm_heads(args, 0, args.heads, args.q_norm);
    norm_heads(args, args.heads, args.kv_heads, args.k_norm);
  }
  keep(cuda::run_rope({.qkv = args.qkv,
                       .tokens = args.batch.tokens,
                       .heads = args.heads,
                       .kv_heads = args.kv_heads,
                       .head_dim = args.head_dim,
                       .rotary_dim = args.rotary_dim,
                       .cos_sin = args.cos_sin,
                       .positions = args.batch.positions,
                       .slots = args.batch.slots,
                       .q_norm = args.norm_spans_heads ? nullptr : args.q_norm,
                       .k_norm = args.norm_spans_heads ? nullptr : args.k_norm,
                       .norm_eps = args.norm_eps,
                       .keys = const_cast<void*>(cache.keys),
                       .values = const_cast<void*>(cache.values),
                       .block_stride = cache.block_stride,
                       .e4m3_cache = cache.type == cuda::KvType::kE4m3,
                       .block_size = cache.block_size,
                       .overflowed_layer = overflow_mark_.as<int32_t>(),
                       .layer = args.layer},
                      stream_));
}

void CudaBackend::rope_attention(const RopeArgs& first, const AttentionArgs& then) {
  const BatchView& batch = first.batch;
  cuda::AttentionCall call = attention_call(then);
  // The kernel that does both writes a sequence's key when it reads that sequence's others.
  if (!batch.fresh_keys && batch.single == batch.sequences &&
      batch.single <= most_rotated_[static_cast<size_t>(call.cache.type)] && !first.norm_spans_heads &&
      first.rotary_dim == first.head_dim) {
    call.rotation = {first.cos_sin, first.q_norm, first.k_norm, first.norm_eps, overflow_mark_.as<int32_t>(),
                     first.layer};
    attend(call, then, first);
  } else {
    rope(first);
    attend(call, then);
  }
}

cuda::AttentionCall CudaBackend::attention_call(const AttentionArgs& args) const {
  const BatchView& batch = args.batch;
  return {.heads = args.heads,
          .kv_heads = args.kv_heads,
          .head_dim = args.head_dim,
          .scale = args.scale,
          .soft_cap = args.soft_cap,
          .window = args.window,
          .cache = static_cast<const CudaKvCache&>(*args.cache).layer(args.layer),
          .q = args.qkv,
          .q_stride = int64_t{args.heads + 2 * args.kv_heads} * args.head_dim,
          .out = is_exact(args.consumer) ? args.out : scratch_.data(),
          .query_start = batch.query_start,
          .context = batch.context,
          .block_table = batch.block_table,
          .table_width = batch.table_width,
          .likely_context = batch.launch_context,
          .rotation = {},
          .deterministic = options_.deterministic,
          .workspace = attention_workspace_.data(),
          .workspace_bytes = attention_workspace_.bytes()};
}

int32_t CudaBackend::launch_context(const KvCache& cache, int32_t sequences, int32_t longest) const {
  if (options_.deterministic) return 0;  // prefill's kernel, see attend()
  const KvCacheSpec& spec = cache.spec();
  cuda::AttentionCall call;
  call.heads = heads_;
  call.kv_heads = spec.kv_heads;
  call.head_dim = spec.head_dim;
  call.cache = static_cast<const CudaKvCache&>(cache).layer(0);
  call.table_width = std::numeric_limits<int>::max();
  call.sequences = sequences;
  const Result<int> context = cuda::launch_context(call, longest);
  return context.ok() ? *context : 0;
}

// The layers of a decode step with the same window find their parts of the batch alike: once for all of them, where the
// step begins. Which windows a model has is learnt from its first step.
void CudaBackend::plan_attention(const BatchView& batch) {
  for (AttentionPlan& plan : plans_) {
    if (!plan.call.has_value() || !is_decode(batch)) continue;
    cuda::AttentionCall& call = *plan.call;
    call.query_start = batch.query_start;
    call.context = batch.context;
    call.block_table = batch.block_table;
    call.table_width = batch.table_width;
    call.likely_context = batch.launch_context;
    call.sequences = call.tokens = batch.sequences;
    const Result<bool> planned = cuda::plan_decode(call, plan.memory.data(), stream_);
    plan.is_ready = planned.ok() && *planned;
    if (!planned.ok()) keep(planned.error());
  }
}

const void* CudaBackend::plan_of(const cuda::AttentionCall& call, const BatchView& batch) {
  if (!is_decode(batch)) return nullptr;
  for (AttentionPlan& plan : plans_) {
    if (!plan.call.has_value()) {
      plan.call = call;
      plan.call->rotation = {};
      return nullptr;
    }
    if (plan.call->window == call.window) return plan.is_ready ? plan.memory.data() : nullptr;
  }
  return nullptr;
}

void CudaBackend::attend(cuda::AttentionCall call, const AttentionArgs& args, const std::optional<RopeArgs>& rotated) {
  const BatchView& batch = args.batch;
  // Where results must not depend on how a sequence was cut into steps, one kernel computes all of them.
  const int32_t single = options_.deterministic ? 0 : batch.single;
  if (single > 0) {
    call.sequences = call.tokens = single;
    // Steps begin with a copy, so only this step's keys may still be on their way.
    call.early_cache_reads = !batch.fresh_keys;
    call.plan = plan_of(call, batch);
    const auto timed = profiler_.time(rotated ? stage::kRopeDecodeAttention : stage::kDecodeAttention, stream_,
                                      [args, rotated, single, lengths = lengths_] {
                                        return rotated ? cost_of(*rotated, args, kForm, lengths)
                                                       : cost_of(args, kForm, lengths, 0, single);
                                      });
    keep(cuda::run_decode(call, stream_));
  }
  if (batch.sequences > single) {
    call.first_sequence = single;
    call.sequences = batch.sequences - single;
    call.tokens = batch.tokens - single;
    call.early_cache_reads = false;
    const auto timed = profiler_.time(stage::kPrefillAttention, stream_, [args, single, lengths = lengths_] {
      return cost_of(args, kForm, lengths, single, args.batch.sequences - single);
    });
    keep(cuda::run_prefill(call, stream_));
  }
  const int64_t features = int64_t{args.heads} * args.head_dim;
  if (!is_exact(args.consumer)) round(scratch_.data(), batch.tokens, features, args.out);
}

void CudaBackend::route(const RouteArgs& args) {
  RouteArgs call = args;
  call.batch_invariant = options_.deterministic;
  const bool gathers = cuda::route_gathers(call);
  const auto timed = profiler_.time(stage::kRoute, stream_, [args, gathers] {
    OperationCost cost = cost_of(args, kForm);
    if (gathers) cost.activation_bytes += kForm.bytes(int64_t{args.rows} * args.routes.top, args.hidden);
    return cost;
  });
  keep(cuda::run_route(call, stream_));
  in_order_ = gathers ? call.gathered : nullptr;
}

void CudaBackend::expert_linear(const ExpertLinearArgs& args) {
  const auto count = static_cast<size_t>(args.routes.experts);
  assert(count <= matrices_.size());
  const CudaWeight& first = device_weight(args.weights[0]);
  for (size_t e = 0; e < count; ++e) {
    const CudaWeight& weight = device_weight(args.weights[e]);
    const cuda::WeightSegment& segment = weight.segments().front();
    if (weight.segments().size() != 1 || segment.bias != nullptr) {
      keep(error(ErrorCode::kUnsupported, "the GPU backend computes no experts with a bias; use --device cpu"));
      return;
    }
    const bool exact = is_exact(args.precision) || args.is_exact(static_cast<int32_t>(e));
    cuda::ExpertMatrix& matrix = matrices_[e];
    matrix = {};
    matrix.dense = !segment.nested;
    if (matrix.dense) {
      matrix.upper = reinterpret_cast<const uint8_t*>(segment.dense);
    } else {
      matrix.upper = segment.matrix.upper;
      matrix.lower = exact ? segment.matrix.lower : nullptr;
      matrix.row_scale = segment.matrix.row_scale;
      matrix.biased = segment.matrix.join == cuda::Join::kBiased;
    }
  }
  const uint64_t assignments = static_cast<uint64_t>(args.rows) * static_cast<uint64_t>(args.routes.top);
  cuda::ExpertLinearCall call{.matrices = matrices_.data(),
                              .routes = args.routes,
                              .n = first.n(),
                              .k = first.k(),
                              .x = args.x,
                              .sorted = args.sorted,
                              .follows = args.follows,
                              .rows = args.rows,
                              .distinct = true,
                              .epilogue = args.epilogue != Epilogue::kGatedActivation ? cuda::ExpertEpilogue::kStore
                                          : args.activation == Activation::kSilu      ? cuda::ExpertEpilogue::kSwiglu
                                                                                      : cuda::ExpertEpilogue::kGeglu,
                              .y = args.y,
                              .gathered = args.gathered};
  // With few rows an expert reading is all that counts, and activations stay FP16 (W8A16) in every FP8 precision; and
  // in deterministic mode always, as a step's size is its company's.
  call.e4m3 =
      args.precision == Precision::kFp8W8A8 && !options_.deterministic && assignments >= cuda::kRoundedRows * count;
  call.sorted = args.sorted || (call.e4m3 && args.gathered != nullptr);  // rounding puts them into order
  call.e4m3 = call.e4m3 && cuda::can_group(call);
  if (call.e4m3) {
    void* const codes = args.sorted ? rounded_.data() : args.gathered;
    round(args.x, args.sorted ? static_cast<int64_t>(assignments) : args.rows, call.k, codes,
          args.sorted ? nullptr : &args.routes);
    call.x = codes;
    call.token_scale = cuda::e4m3_scales(codes, static_cast<int64_t>(assignments), call.k);
    call.follows = false;
  } else {
    const bool in_order = !args.sorted && args.gathered != nullptr && args.gathered == in_order_;
    call.sorted = args.sorted || in_order;
    if (in_order) call.x = args.gathered;
  }
  in_order_ = nullptr;
  const Precision inputs = call.e4m3 ? Precision::kFp8W8A8 : Precision::kFp16;
  ExpertLinearArgs product = args;
  product.sorted = call.sorted;
  const auto timed = profiler_.time(
      args.stage, stream_,
      // How many experts are read is on the device.
      [product, inputs, start = profiler_.keep(args.routes.start, count + 1, stream_)] {
        return cost_of(product, kForm, start, inputs);
      },
      product_precision(first, is_exact(args.precision) || call.e4m3 ? args.precision : Precision::kFp8));
  keep(cuda::run_expert_linear(call, stream_));
}

void CudaBackend::combine_experts(const CombineExpertsArgs& args) {
  const auto timed = profiler_.time(stage::kCombine, stream_, [args] { return cost_of(args, kForm); });
  keep(cuda::run_combine(args, stream_));
}

void CudaBackend::combine_rms_norm(const CombineExpertsArgs& first, const RmsNormArgs& then) {
  if (then.x_is_f32 || then.out == nullptr || first.hidden % 8 != 0 || first.hidden > cuda::kMaxExpertColumns) {
    combine_experts(first);
    rms_norm(then);
    return;
  }
  const auto timed =
      profiler_.time(stage_of(first, then, kForm), stream_, [first, then] { return cost_of(first, then, kForm); });
  cuda::GemmInputCall call = norm_call(then);
  call.source = cuda::GemmInputCall::Source::kExperts;
  call.experts = &first;
  keep(cuda::prepare_gemm_input(call, stream_));
}

void CudaBackend::gather_rows(const GatherRowsArgs& args) {
  const auto timed = profiler_.time(stage::kGatherRows, stream_, [args] { return cost_of(args, kForm); });
  keep(cuda::run_gather({args.x, args.rows, args.count, args.hidden, args.out, args.is_f32}, stream_));
}

void CudaBackend::sample(const SampleArgs& args) {
  const auto timed = profiler_.time(stage::kSample, stream_, [args] { return cost_of(args); });
  const auto* const history = static_cast<const CudaTokenHistory*>(args.history);
  keep(cuda::run_sample({.logits = {args.logits, args.vocab, args.rows, args.vocab},
                         .needs = args.needs,
                         .row = args.row,
                         .bias = args.bias,
                         .allowed = args.allowed,
                         .allowed_words = args.allowed_words,
                         .history = history != nullptr ? history->counts : cuda::TokenCounts(),
                         .counter = history != nullptr ? history->counter.as<uint32_t>() : nullptr,
                         .out = args.out,
                         .top = args.top},
                        stream_));
}

void CudaBackend::linear_sample(const LinearArgs& first, const SampleArgs& then) {
  const bool finds_largest = first.y_is_f32 && first.soft_cap <= 0 && cuda::needs_largest_only(then.needs) &&
                             cuda::LinearRunner::finds_largest(device_weight(first.weight)) &&
                             cuda::RowLargest::bytes(then.rows, then.vocab) <=
                                 static_cast<size_t>(then.rows) * static_cast<size_t>(then.vocab) * sizeof(float);
  multiply(first, finds_largest);
  if (!finds_largest) return sample(then);
  const auto timed = profiler_.time(
      stage::kSample, stream_, [then] { return cost_of(then, cuda::RowLargest::row_bytes(then.rows, then.vocab)); });
  keep(cuda::run_largest(
      {.candidates = static_cast<const uint64_t*>(first.y), .rows = then.rows, .vocab = then.vocab, .out = then.out},
      stream_));
}

void CudaBackend::score(const ScoreArgs& args) {
  const auto timed = profiler_.time(stage::kScore, stream_, [args] { return cost_of(args); });
  keep(cuda::run_score({.logits = {args.logits, args.vocab, args.rows, args.vocab},
                        .target = args.target,
                        .top_n = args.top_n,
                        .out = args.out,
                        .top = args.top,
                        .top_stride = args.top_n},
                       stream_));
}

Result<std::unique_ptr<Graph>> CudaBackend::end_capture() {
  cudaGraph_t recorded = nullptr;
  const Status ended = check(cudaStreamEndCapture(stream_, &recorded), "capturing a step");
  if (failure_) {  // which may be why the capture did not end well, and names what it was
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    return *failure_;
  }
  NFP_RETURN_IF_ERROR(ended);
  const auto before = memory();
  auto graph = std::make_unique<CudaGraph>();
  cudaError_t status = cudaGraphInstantiate(&graph->executable, recorded, 0);
  cudaGraphDestroy(recorded);
  if (status == cudaSuccess) status = cudaGraphUpload(graph->executable, stream_);  // takes memory now, not in a step
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return error(ErrorCode::kResource, "no GPU memory for a captured step");
  }
  NFP_RETURN_IF_ERROR(check(status, "instantiating a captured step"));
  const auto after = memory();
  if (before && after && after->free < before->free) graph->taken = before->free - after->free;
  return std::unique_ptr<Graph>(std::move(graph));
}

}  // namespace

Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options) { return CudaBackend::create(options); }

}  // namespace nfp
