// The one seam between a model and a machine.
//
// A backend owns memory, weights and the KV cache in layouts of its own, and runs the operations of a step on them.
// Every operation takes plain views (device pointer, counts) and only enqueues work on the backend's one stream: it
// does not allocate, wait or read anything back, so that a whole step can be captured once and replayed. What changes
// from step to step (tokens, positions, block tables, sampling parameters) is read from device memory; what is passed
// by value (counts, precision) is part of a captured step's identity.
//
// Pointers called "device" are in the backend's memory (on a CPU: ordinary memory). Activations are
// [rows, features], dense, row-major, of activation_dtype(). An operation that fails records the first error;
// synchronize() and download() return it. Shapes that disagree are the caller's bug and are asserted.
//
// The scalar CPU backend is the reference: all others are tested against it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
};

// ---- KV cache ------------------------------------------------------------------------------------------------------

struct KvCacheSpec {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int block_size = 16;  // tokens a block
  int64_t blocks = 0;
  DType dtype = DType::kF16;  // kF16 or kF32
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

// Tokens of all sequences back to back. Prefill, chunked prefill and decode differ only in the numbers. All arrays are
// device memory.
struct BatchView {
  int32_t tokens = 0;                    // T, over all sequences
  int32_t sequences = 0;                 // S
  int32_t max_query = 0;                 // longest query of a sequence (a bound for choosing kernels)
  int32_t max_context = 0;               // longest context (likewise)
  int32_t table_width = 0;               // blocks a row of block_table
  const int32_t* token_ids = nullptr;    // [T]
  const int32_t* positions = nullptr;    // [T] from 0 in each sequence
  const int32_t* slots = nullptr;        // [T] KV slot that token t's key and value are written to
  const int32_t* query_start = nullptr;  // [S + 1] sequence s has tokens query_start[s] .. query_start[s+1]-1
  const int32_t* context = nullptr;      // [S] tokens of s in the KV cache once this step's are written
  const int32_t* block_table = nullptr;  // [S, table_width]
};

// ---- operations ----------------------------------------------------------------------------------------------------

enum class Activation : uint8_t { kSilu, kGeluTanh };

enum class Epilogue : uint8_t {
  kStore,            // y = x W^T + bias
  kAdd,              // y = y + (x W^T + bias): the residual stream
  kGatedActivation,  // y[:, i] = act(g_i) * u_i of interleaved gate and up rows; y is [rows, n / 2]
};

struct EmbedArgs {
  const LinearWeight* table = nullptr;  // [vocabulary, hidden]; read exactly (both bytes) in every precision
  const int32_t* token_ids = nullptr;   // device [rows]
  int32_t rows = 0;
  float scale = 1.0f;   // Gemma multiplies by sqrt(hidden)
  void* out = nullptr;  // [rows, hidden]
};

struct RmsNormArgs {
  const void* x = nullptr;        // [rows, hidden]
  const float* weight = nullptr;  // device [hidden]
  float eps = 1e-5f;
  int32_t rows = 0;
  int32_t hidden = 0;
  // The precision of the linear that reads `out`: a backend may store out in the form that linear wants (E4M3 with
  // scales), in which case only linear can read it. out has activation_bytes(rows, hidden).
  Precision consumer = Precision::kFp16;
  void* out = nullptr;
};

struct LinearArgs {
  const LinearWeight* weight = nullptr;  // [n, k]
  const void* x = nullptr;               // [rows, k]
  int32_t rows = 0;
  Precision precision = Precision::kFp16;  // a dense weight computes in FP16 whatever this says
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;  // for kGatedActivation
  Precision consumer = Precision::kFp16;      // as in RmsNormArgs, for kGatedActivation's y
  void* y = nullptr;                          // [rows, n] (or n / 2)
  bool y_is_f32 = false;                      // logits: FP32 whatever activation_dtype() is
};

// Rotates q and k by position, rotate-half convention (Hugging Face), and writes k and v to the cache.
struct RopeArgs {
  void* qkv = nullptr;  // [tokens, (heads + 2 * kv_heads) * head_dim]: q heads, k heads, v heads; q is rotated in place
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  const float* cos_sin = nullptr;  // device [max positions, head_dim]: head_dim/2 cosines, then head_dim/2 sines
  const float* q_norm = nullptr;   // device [head_dim] RMSNorm weights a head before rotation (Qwen 3), or null
  const float* k_norm = nullptr;
  float norm_eps = 1e-6f;
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

// out[i] = x[rows[i]].
struct GatherRowsArgs {
  const void* x = nullptr;        // [*, hidden]
  const int32_t* rows = nullptr;  // device [count]
  int32_t count = 0;
  int32_t hidden = 0;
  void* out = nullptr;  // [count, hidden]
};

// What each sequence slot has seen, for penalties: which tokens were in the prompt and how often each was generated.
class TokenHistory {
 public:
  virtual ~TokenHistory() = default;
  virtual int32_t slots() const = 0;
};

// Sampling parameters of R rows, device arrays of [R] unless a shape is given. A null array means the neutral value for
// all rows.
struct SamplingView {
  const float* temperature = nullptr;         // 0 = greedy (lowest id wins a tie); null = greedy
  const int32_t* top_k = nullptr;             // 0 = off
  const float* top_p = nullptr;               // 1 = off
  const float* min_p = nullptr;               // 0 = off
  const float* repetition_penalty = nullptr;  // 1 = off (CTRL paper, section 4.1; prompt and output tokens)
  const float* presence_penalty = nullptr;    // 0 = off; output tokens, as OpenAI defines it
  const float* frequency_penalty = nullptr;   // 0 = off; output tokens
  const int32_t* history_slot = nullptr;      // slot in `history`, -1 = none
  const uint64_t* seed = nullptr;             // with `draw` the key and counter of Philox4x32-10: nothing else
  const uint64_t* draw = nullptr;             //   decides a row's random number
  const int32_t* bias_start = nullptr;        // [R + 1] into bias_token and bias_value (logit_bias; -inf forbids)
  const int32_t* bias_token = nullptr;
  const float* bias_value = nullptr;
  const uint32_t* allowed =
      nullptr;  // [R, allowed_words] bit v % 32 of word v / 32: may v be sampled (grammars); null = all
  const int32_t* allowed_row = nullptr;  // row of `allowed` for each of R, -1 = unrestricted
  int32_t allowed_words = 0;
};

// Order: bias and mask, penalties, temperature, top-k, top-p, min-p, draw (as vLLM orders them). Reported
// log-probabilities are those of the raw logits, before any of it.
struct SampleArgs {
  const float* logits = nullptr;  // device [rows, vocab]; may be overwritten
  int32_t rows = 0;
  int32_t vocab = 0;
  SamplingView sampling;
  TokenHistory* history = nullptr;  // the sampled token is appended to the row's slot
  int32_t top_n = 0;                // alternatives to report a row, 0..kMaxTopLogprobs
  int32_t* token = nullptr;         // device [rows]
  float* logprob = nullptr;         // device [rows] of the sampled token, or null
  int32_t* rank = nullptr;          // device [rows] 1 = the likeliest, or null
  int32_t* top_token = nullptr;     // device [rows, top_n], likeliest first
  float* top_logprob = nullptr;     // device [rows, top_n]
};

// Log-probabilities of given tokens (prompt logprobs, perplexity).
struct ScoreArgs {
  const float* logits = nullptr;    // device [rows, vocab]
  const int32_t* target = nullptr;  // device [rows]
  int32_t rows = 0;
  int32_t vocab = 0;
  int32_t top_n = 0;
  float* logprob = nullptr;      // device [rows]
  int32_t* rank = nullptr;       // device [rows], or null
  int32_t* top_token = nullptr;  // device [rows, top_n]
  float* top_logprob = nullptr;
};

// A captured step.
class Graph {
 public:
  virtual ~Graph() = default;
};

// ---- the backend ---------------------------------------------------------------------------------------------------

struct BackendInfo {
  std::string name;     // "cpu"
  std::string device;   // "Intel Xeon ..., avx512 (bf16), 2 threads"
  std::string kernels;  // "scalar", "avx2", "avx512"
  int threads = 1;
};

// Time spent in one kind of operation since set_profiling(true).
struct StageTime {
  std::string_view stage;  // "linear", "attention", ...
  uint64_t calls = 0;
  double seconds = 0;
  uint64_t weight_bytes = 0;  // read by linear and embed
  uint64_t flops = 0;         // of linear and attention, 2 a multiply-add
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const BackendInfo& info() const = 0;

  // Memory. Fresh memory is zero. upload may return before the copy is done but has read src by then; download waits
  // for everything enqueued before.
  virtual Result<Buffer> allocate(size_t bytes) = 0;
  virtual void free(void* data, size_t bytes) = 0;
  virtual Status upload(void* dst, const void* src, size_t bytes) = 0;
  virtual Status download(void* dst, const void* src, size_t bytes) = 0;
  virtual Status synchronize() = 0;

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
  virtual void gather_rows(const GatherRowsArgs& args) = 0;
  virtual void sample(const SampleArgs& args) = 0;
  virtual void score(const ScoreArgs& args) = 0;

  // Between begin_capture and end_capture operations are recorded, not run; replay runs them with the device memory as
  // it is then. The buffers and objects named by the operations must outlive the graph.
  virtual Status begin_capture() = 0;
  virtual Result<std::unique_ptr<Graph>> end_capture() = 0;
  virtual Status replay(Graph& graph) = 0;

  virtual void set_profiling(bool on) = 0;  // clears the times
  virtual std::vector<StageTime> profile() const = 0;
};

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
