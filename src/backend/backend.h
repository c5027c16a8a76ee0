// The one seam between a model and a machine.
//
// A backend owns memory, weights and the KV cache in layouts of its own, and runs the operations of a step on them.
// Every operation takes plain views (device pointer, counts) and only enqueues work on the backend's one stream: it
// does not allocate, wait or read anything back, so that a whole step can be captured once and replayed, and the next
// one enqueued while it runs. What changes from step to step (tokens, positions, block tables, sampling parameters) is
// read from device memory; what is passed by value (counts, precision) is part of a captured step's identity.
//
// Pointers called "device" are in the backend's memory (on a CPU: ordinary memory). Activations are
// [rows, features], dense, row-major, of activation_dtype(). An operation that fails records the first error;
// wait(), synchronize() and download() return it. Shapes that disagree are the caller's bug and are asserted.
//
// The residual stream of some families leaves FP16's range. There it, what is added to it and norms of what is added
// are FP32 whatever activation_dtype() is, as the flags ..._is_f32 say. Inputs of linear layers are not: norms bound
// them.
//
// The scalar CPU backend is the reference: all others are tested against it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/expert_routes.h"
#include "backend/sampling.h"
#include "base/dtype.h"
#include "base/result.h"
#include "nested/matrix_reader.h"
#include "nested/precision.h"

namespace nfp {

class Backend;

// Device memory. Freed with the object; the backend must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend* owner, void* data, size_t bytes) : owner_(owner), data_(data), bytes_(bytes) {}
  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  void reset();

 private:
  Backend* owner_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// ---- weights -------------------------------------------------------------------------------------------------------

// How the rows of several matrices with equal cols become one weight.
enum class RowOrder : uint8_t {
  kConcat,      // all rows of the first, then of the second, ... (q, k, v)
  kInterleave,  // row i of the first, row i of the second (gate, up): what Epilogue::kGatedActivation needs
};

struct LinearSpec {
  std::vector<const MatrixReader*> parts;  // read during make_linear only; storages may differ
  RowOrder order = RowOrder::kConcat;
  std::vector<float> bias;  // [n] in the order of the parts' concatenation, or empty
};

// A weight [n, k] in the backend's layout. Both byte planes are held once, and nothing else of the matrix.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  virtual int64_t n() const = 0;
  virtual int64_t k() const = 0;
  // Bytes that one use reads in this precision (for GB/s in `bench`), and bytes held.
  virtual size_t bytes_read(Precision precision) const = 0;
  virtual size_t bytes_held() const = 0;
  // The form of inputs that it wants in a step of this precision: `consumer` of the operation that writes them.
  virtual Precision consumes(Precision step) const { return step; }
};

// ---- KV cache ------------------------------------------------------------------------------------------------------

struct KvCacheSpec {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int block_size = 16;  // tokens a block
  int64_t blocks = 0;
  DType dtype = DType::kF16;  // kF16, kF8E4M3 (scale 1, magnitudes over 448 become 448), kF32 (CPU only)
};

// Keys and values of all layers, in blocks of block_size tokens. Slot s is token s % block_size of block s /
// block_size.
class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual const KvCacheSpec& spec() const = 0;
  virtual size_t bytes() const = 0;
};

// ---- one step's ragged batch ---------------------------------------------------------------------------------------

// Tokens of all sequences back to back. Prefill, chunked prefill and decode differ only in the numbers. Sequences with
// one token come first (a backend may have a kernel for them). All arrays are device memory.
struct BatchView {
  int32_t tokens = 0;                  // T, over all sequences
  int32_t sequences = 0;               // S
  int32_t single = 0;                  // of these, leading ones with one token each
  int32_t table_width = 0;             // blocks a row of block_table
  int32_t launch_context = 0;          // Backend::launch_context of a step of single tokens; 0 = not known
  const int32_t* token_ids = nullptr;  // [T] where token_source is below 0
  const int32_t* token_source =
      nullptr;  // [T] >= 0: the token is that row's of the step before; null = all from token_ids
  const SampledRow* previous = nullptr;  // what the step before sampled, for token_source
  const int32_t* positions = nullptr;    // [T] from 0 in each sequence
  const int32_t* slots = nullptr;        // [T] KV slot that token t's key and value are written to
  const int32_t* query_start = nullptr;  // [S + 1] sequence s has tokens query_start[s] .. query_start[s+1]-1
  const int32_t* context = nullptr;      // [S] tokens of s in the KV cache once this step's are written
  const int32_t* block_table = nullptr;  // [S, table_width]

  // Each sequence's last token, where nobody will ask for another one's hidden state.
  struct Last {
    const int32_t* token = nullptr;     // [S] its place among the T
    const int32_t* position = nullptr;  // [S]
    const int32_t* start = nullptr;     // [S + 1] 0, 1, 2, ...: query_start of those alone
  };
  Last last;              // null = all are wanted
  bool narrowed = false;  // narrow()'s
  // Keys before a token's own may be of this step too: narrow()'s, and where several sequences of one token are one
  // sequence's next tokens (draft tokens that are verified).
  bool fresh_keys = false;
};

// The last tokens of a batch that has them (BatchView::last): a batch of its own for attention, once all of the step's
// keys are written. It has no ids and no slots.
inline BatchView narrow(BatchView batch) {
  batch.tokens = batch.single = batch.sequences;
  batch.positions = batch.last.position;
  batch.query_start = batch.last.start;
  batch.token_ids = batch.token_source = batch.slots = nullptr;
  batch.last = {};
  batch.narrowed = batch.fresh_keys = true;
  return batch;
}

// ---- operations ----------------------------------------------------------------------------------------------------

// What a profile calls operations, which a backend may run together. Matrix products are named by who asks for them.
namespace stage {
inline constexpr std::string_view kEmbed = "embed";
inline constexpr std::string_view kRmsNorm = "rms_norm";
inline constexpr std::string_view kRmsNormRound = "rms_norm+round";  // to E4M3 with a scale a row
inline constexpr std::string_view kAdd = "add";                      // to the residual stream, without a norm
inline constexpr std::string_view kRound = "round";                  // as above, by itself
inline constexpr std::string_view kLinear = "linear";
inline constexpr std::string_view kActivation = "activation";  // of gate and up, where the product does not do it
inline constexpr std::string_view kActivationRound = "activation+round";
inline constexpr std::string_view kRope = "rope";  // with the norms of heads and what is written to the cache
inline constexpr std::string_view kPrefillAttention = "prefill_attention";
inline constexpr std::string_view kDecodeAttention = "decode_attention";
inline constexpr std::string_view kRopeDecodeAttention = "rope+decode_attention";
inline constexpr std::string_view kRoute = "route";
inline constexpr std::string_view kCombine = "combine";
inline constexpr std::string_view kCombineRmsNorm = "combine+rms_norm";
inline constexpr std::string_view kCombineRmsNormRound = "combine+rms_norm+round";
inline constexpr std::string_view kGatherRows = "gather_rows";
inline constexpr std::string_view kSample = "sample";
inline constexpr std::string_view kScore = "score";
inline constexpr std::string_view kCopy = "copy";
}  // namespace stage

enum class Activation : uint8_t { kSilu, kGeluTanh };

enum class Epilogue : uint8_t {
  kStore,            // y = x W^T + bias
  kGatedActivation,  // y[:, i] = act(g_i) * u_i of interleaved gate and up rows; y is [rows, n / 2]
};

struct EmbedArgs {
  const LinearWeight* table = nullptr;  // [vocabulary, hidden]; read exactly (both bytes) in every precision
  BatchView batch;
  float scale = 1.0f;   // Gemma multiplies by sqrt(hidden)
  void* out = nullptr;  // [tokens, hidden]
  bool out_is_f32 = false;
};

// The residual stream belongs to the norm: a linear layer stores its product, and the norm after it adds that. So a
// norm of the product, a sum over devices or a quantiser fits between the two.
struct RmsNormArgs {
  const void* x = nullptr;        // [rows, hidden]: what is normalised, or with `residual` what is added to it before
  void* residual = nullptr;       // [rows, hidden] becomes residual + x, and that is normalised; null = x alone
  const float* weight = nullptr;  // device [hidden]
  float eps = 1e-5f;
  int32_t rows = 0;
  int32_t hidden = 0;
  bool x_is_f32 = false;    // and so is residual
  bool out_is_f32 = false;  // it is added to the stream, not read by a linear
  // The precision of the linear that reads `out`: a backend may store out in the form that linear wants (E4M3 with
  // scales), in which case only linear can read it. out has activation_bytes(rows, hidden).
  Precision consumer = Precision::kFp16;
  void* out = nullptr;  // null = only the sum
};

struct LinearArgs {
  const LinearWeight* weight = nullptr;  // [n, k]
  const void* x = nullptr;               // [rows, k]
  bool x_is_plain = false;               // of activation_dtype(), although the weight consumes another form
  int32_t rows = 0;
  Precision precision = Precision::kFp16;  // a dense weight computes in FP16 whatever this says
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;  // for kGatedActivation
  Precision consumer = Precision::kFp16;      // as in RmsNormArgs, for kGatedActivation's y
  void* y = nullptr;                          // [rows, n] (or n / 2)
  bool y_is_f32 = false;                      // for kStore: logits, and what is added to an FP32 stream
  float soft_cap = 0.0f;                      // with y_is_f32: y = cap * tanh(y / cap) where > 0
  std::string_view stage = stage::kLinear;    // what a profile counts it as; static text
};

// Rotates q and k by position, rotate-half convention (Hugging Face), and writes k and v to the cache.
struct RopeArgs {
  void* qkv = nullptr;  // [tokens, (heads + 2 * kv_heads) * head_dim]: q heads, k heads, v heads; q is rotated in place
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;          // leading features of a head that rotate; the others stay
  const float* cos_sin = nullptr;  // device [max positions, rotary_dim]: rotary_dim/2 cosines, then as many sines
  const float* q_norm = nullptr;   // device [head_dim] RMSNorm weights a head before rotation (Qwen 3), or null
  const float* k_norm = nullptr;
  float norm_eps = 1e-6f;
  // One norm over all heads together (OLMoE): q_norm is [heads * head_dim], k_norm [kv_heads * head_dim].
  bool norm_spans_heads = false;
  KvCache* cache = nullptr;
  int layer = 0;
  BatchView batch;
};

// Causal attention of each query token over its sequence's cache (keys of positions <= its own).
struct AttentionArgs {
  const void* qkv = nullptr;  // as RopeArgs leaves it; only q is read
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float scale = 1.0f;     // on q k^T, usually 1 / sqrt(head_dim)
  int32_t window = 0;     // sliding window: keys with position > own - window; 0 = all
  float soft_cap = 0.0f;  // logits = cap * tanh(logits / cap) where > 0
  KvCache* cache = nullptr;
  int layer = 0;
  BatchView batch;
  void* out = nullptr;  // [tokens, heads * head_dim]
  Precision consumer = Precision::kFp16;
};

// ---- experts (mixture-of-experts layers) ----

// The linear layer of each assignment's expert. Its result for a row does not depend on the step's other rows.
struct ExpertLinearArgs {
  const LinearWeight* const* weights = nullptr;  // host [experts], each [n, k]; outlives a graph
  ExpertRoutes routes;
  const void* x = nullptr;  // [rows, k], or where `sorted` [rows * top, k] by assignment
  bool sorted = false;
  bool follows = false;  // the operation just before this one is the product of the same routes that made x
  int32_t rows = 0;      // of the step, before assignment
  Precision precision = Precision::kFp16;
  std::array<uint64_t, kMaxExperts / 64> exact{};  // experts that compute in FP16 whatever `precision` is
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;  // for kGatedActivation
  void* y = nullptr;                          // [rows * top, n (or n / 2)] by assignment
  // Working space for x by assignment, where it is not sorted: activation_bytes(rows * top, k).
  void* gathered = nullptr;
  std::string_view stage = stage::kLinear;  // as in LinearArgs

  bool is_exact(int32_t expert) const {
    return (exact[static_cast<size_t>(expert) / 64] >> (static_cast<size_t>(expert) % 64) & 1u) != 0;
  }
};

// out[i] = x[rows[i]].
struct GatherRowsArgs {
  const void* x = nullptr;        // [*, hidden]
  const int32_t* rows = nullptr;  // device [count]
  int32_t count = 0;
  int32_t hidden = 0;
  void* out = nullptr;  // [count, hidden]
  bool is_f32 = false;  // x and out
};

// What each sequence slot has seen, for penalties: which tokens were in the prompt and how often each was generated.
class TokenHistory {
 public:
  virtual ~TokenHistory() = default;
  virtual int32_t slots() const = 0;
};

// Tokens for rows of logits. What each row asks for is on the device (SamplingRow); `needs` bounds what any of them
// does.
struct SampleArgs {
  const float* logits = nullptr;  // device [rows, vocab]
  int32_t rows = 0;
  int32_t vocab = 0;
  uint32_t needs = 0;                 // bits of SamplingNeeds
  const SamplingRow* row = nullptr;   // device [rows]
  const LogitBias* bias = nullptr;    // device
  const uint32_t* allowed = nullptr;  // device [*, allowed_words] bit v % 32 of word v / 32: may v be sampled
  int32_t allowed_words = 0;
  TokenHistory* history = nullptr;  // the sampled token is appended to the row's slot
  SampledRow* out = nullptr;        // device [rows]
  TokenLogprob* top = nullptr;      // device [rows, kMaxTopLogprobs], the first `report` of a row, likeliest first
};

// Log-probabilities of given tokens (prompt logprobs, perplexity).
struct ScoreArgs {
  const float* logits = nullptr;    // device [rows, vocab]
  const int32_t* target = nullptr;  // device [rows]
  int32_t rows = 0;
  int32_t vocab = 0;
  int32_t top_n = 0;            // likeliest tokens to report a row, 0..kMaxTopLogprobs
  SampledRow* out = nullptr;    // device [rows], of the target
  TokenLogprob* top = nullptr;  // device [rows, top_n], likeliest first
};

// `rows` pieces of `bytes`, `dst_pitch` and `src_pitch` bytes apart; between host (allocate_host) and device either
// way, or within the device.
struct CopyArgs {
  void* dst = nullptr;
  const void* src = nullptr;
  size_t bytes = 0;
  int32_t rows = 1;
  size_t dst_pitch = 0;
  size_t src_pitch = 0;
};

// What was enqueued before record() is done once wait() returns.
class Event {
 public:
  virtual ~Event() = default;
};

// A captured step.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual size_t bytes() const { return 0; }  // of device memory that it took
};

// ---- the backend ---------------------------------------------------------------------------------------------------

struct BackendInfo {
  std::string name;     // "cpu"
  std::string device;   // "Intel Xeon ..., avx512 (bf16), 2 threads"
  std::string kernels;  // "scalar", "avx2", "avx512"
  int threads = 1;
};

// What working space must be taken for.
struct StepReserve {
  int32_t tokens = 0;
  int32_t sequences = 0;
  int32_t hidden = 0;  // features of the residual stream
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;     // of a head's features, those that rotate; 0 = all
  int32_t experts = 0;        // of a layer; 0 = none
  int32_t top_experts = 0;    // of a token
  int32_t expert_width = 0;   // features between an expert's matrices
  bool plain_inputs = false;  // LinearArgs::x_is_plain without experts
};

struct DeviceMemory {
  uint64_t total = 0;  // bytes
  uint64_t free = 0;
  uint64_t others = 0;  // taken before the backend took any: by other programs and the driver
};

// What operations move and compute at the least (backend/operation_cost.h).
struct OperationCost {
  uint64_t weight_bytes = 0;      // read, of matrices and norms
  uint64_t activation_bytes = 0;  // read and written, and tables of the step
  uint64_t kv_bytes = 0;          // read from and written to the KV cache
  uint64_t flops = 0;             // 2 a multiply-add
};

// Time spent in one kind of operation since set_profiling(true).
struct StageTime {
  std::string_view stage;              // LinearArgs::stage, or of namespace stage
  std::optional<Precision> precision;  // what matrix products were computed in; none = another operation
  uint64_t calls = 0;
  double seconds = 0;
  OperationCost cost;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const BackendInfo& info() const = 0;

  // Whether linear layers can be computed in this precision. FP16 always.
  virtual bool supports(Precision precision) const = 0;
  // Which FP8 to run where none is asked for by name, but speed is wanted.
  virtual Precision fastest_fp8() const { return kFp8OnCpu; }
  // Whether replaying a captured step is quicker than enqueueing it again: then steps are padded to a few sizes.
  virtual bool prefers_graphs() const = 0;
  // Of a step of `sequences` single tokens: a context of at least `longest`, the longest of theirs, that the launch of
  // attention is sized by. Of few values, as each is another captured step; 0 = for what the block table holds.
  virtual int32_t launch_context(const KvCache&, int32_t /*sequences*/, int32_t /*longest*/) const { return 0; }
  // Tokens of a step, and sequences of one, at most, where nobody says.
  virtual int32_t default_step_tokens() const { return 2048; }
  virtual int32_t default_sequences() const { return 64; }
  // For threads that are not this program's: they work on this device until what this returns is gone, whichever is
  // theirs otherwise. Null = there is nothing to be done.
  virtual std::shared_ptr<void> enter() { return nullptr; }
  // For whoever enqueues a step: held until all of it is enqueued. Steps of several backends of the process then do not
  // run at the same time on one device. Null = there is nothing to be done.
  virtual std::shared_ptr<void> turn() { return nullptr; }

  // Once weights are there, before the first step: steps will have at most this.
  virtual Status reserve(const StepReserve& most) = 0;
  // Of the device, where it is apart from the host's.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }

  // Memory. Fresh memory is zero. upload may return before the copy is done but has read src by then; download waits
  // for everything enqueued before.
  virtual Result<Buffer> allocate(size_t bytes) = 0;
  virtual void free(void* data, size_t bytes) = 0;
  virtual Status upload(void* dst, const void* src, size_t bytes) = 0;
  virtual Status download(void* dst, const void* src, size_t bytes) = 0;
  virtual Status synchronize() = 0;

  // Copies in stream order that nobody waits for. Host memory must come from allocate_host and stay as it is until an
  // event recorded afterwards has passed.
  virtual Result<Buffer> allocate_host(size_t bytes) = 0;
  virtual void copy(const CopyArgs& args) = 0;
  // Copies of which none touches what another writes, as one operation where that is quicker.
  virtual void copy_all(std::span<const CopyArgs> all) {
    for (const CopyArgs& args : all) {
      if (args.bytes > 0 && args.rows > 0) copy(args);
    }
  }
  virtual Result<std::unique_ptr<Event>> make_event() = 0;
  virtual void record(Event& event) = 0;
  // kDevice: an operation before it failed, or the device hangs (BackendOptions::hang_s); it does not come back.
  virtual Status wait(Event& event) = 0;

  // Activations: dtype of what operations exchange, and the bytes that [rows, features] needs (scales included).
  virtual DType activation_dtype() const = 0;
  virtual size_t activation_bytes(int64_t rows, int64_t features) const = 0;

  // Things with a layout of the backend's own. Loading runs on all threads. Errors name the matrix.
  virtual Result<std::unique_ptr<LinearWeight>> make_linear(const LinearSpec& spec) = 0;
  virtual Result<std::unique_ptr<KvCache>> make_kv_cache(const KvCacheSpec& spec) = 0;
  virtual size_t kv_bytes_per_block(const KvCacheSpec& spec) const = 0;
  virtual Result<std::unique_ptr<TokenHistory>> make_token_history(int32_t slots, int32_t vocab) = 0;
  // Slot's history becomes these tokens (host memory; used when a sequence starts, or starts again after preemption).
  virtual Status reset_history(TokenHistory& history, int32_t slot, std::span<const int32_t> prompt,
                               std::span<const int32_t> output) = 0;

  // Operations of a step, in stream order.
  virtual void embed(const EmbedArgs& args) = 0;
  virtual void rms_norm(const RmsNormArgs& args) = 0;
  virtual void linear(const LinearArgs& args) = 0;
  virtual void rope(const RopeArgs& args) = 0;
  virtual void attention(const AttentionArgs& args) = 0;
  // One after the other, of the same batch and cache. A backend may do both in one kernel, after which qkv is of no
  // use.
  virtual void rope_attention(const RopeArgs& first, const AttentionArgs& then) {
    rope(first);
    attention(then);
  }
  virtual void route(const RouteArgs& args) = 0;
  virtual void expert_linear(const ExpertLinearArgs& args) = 0;
  virtual void combine_experts(const CombineExpertsArgs& args) = 0;
  // One after the other, where first.out is then.x and is added to a residual. A backend may do both in one kernel,
  // after which nobody may read first.out.
  virtual void combine_rms_norm(const CombineExpertsArgs& first, const RmsNormArgs& then) {
    combine_experts(first);
    rms_norm(then);
  }
  virtual void gather_rows(const GatherRowsArgs& args) = 0;
  virtual void sample(const SampleArgs& args) = 0;
  // One after the other, where first.y is then.logits. A backend may do both without storing logits, after which nobody
  // may read them.
  virtual void linear_sample(const LinearArgs& first, const SampleArgs& then) {
    linear(first);
    sample(then);
  }
  virtual void score(const ScoreArgs& args) = 0;

  // Between begin_capture and end_capture operations are recorded, not run; replay runs them with the device memory as
  // it is then. The buffers and objects named by the operations must outlive the graph.
  virtual Status begin_capture() = 0;
  virtual Result<std::unique_ptr<Graph>> end_capture() = 0;  // kResource: no memory for it; nothing else has failed
  virtual Status replay(Graph& graph) = 0;

  virtual void set_profiling(bool on) = 0;  // clears the times
  virtual bool profiling() const = 0;       // operations of a replayed step are not told apart: run it eagerly
  // In the order in which the stages came first.
  virtual std::vector<StageTime> profile() const = 0;
};

// How a step asked for in this precision is computed: kFp8 becomes kFp8W8A8 where the backend has only that.
inline Precision computed_precision(const Backend& backend, Precision asked) {
  return backend.supports(asked) || is_exact(asked) ? asked : Precision::kFp8W8A8;
}

inline Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    owner_ = std::exchange(other.owner_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

inline void Buffer::reset() {
  if (owner_ != nullptr && data_ != nullptr) owner_->free(data_, bytes_);
  owner_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace nfp
