// Operations are recorded and run when something waits for them (synchronize, download, upload, free), so that a whole
// step costs one fork of the thread pool. A captured graph is the same list, kept.
#include "backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "backend/cpu/executor.h"
#include "backend/cpu/huge_pages.h"
#include "backend/cpu/kv_cache.h"
#include "backend/cpu/packed_weight.h"
#include "backend/cpu/thread_count.h"
#include "backend/cpu/token_history.h"
#include "base/cpu_topology.h"

namespace nfp {
namespace {

using cpu::KernelTable;
using cpu::Operation;

class CpuGraph final : public Graph {
 public:
  explicit CpuGraph(std::vector<Operation> recorded) : operations(std::move(recorded)) {}
  std::vector<Operation> operations;
};

class CpuEvent final : public Event {
 public:
  uint64_t after = 0;  // operations recorded before it, since the backend was made
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& kernels, int threads, std::vector<std::vector<int>> cpus, int nodes)
      : threads_(threads, std::move(cpus)), executor_(kernels, threads_, nodes) {
    info_.name = "cpu";
    info_.kernels = kernels.name;
    info_.threads = threads_.size();
    info_.device =
        fmt::format("{}, {}, {} thread{}", cpu_name(), kernels.name, threads_.size(), threads_.size() == 1 ? "" : "s");
  }
  ~CpuBackend() override { flush(); }

  const BackendInfo& info() const override { return info_; }

  bool supports(Precision) const override { return true; }
  bool prefers_graphs() const override { return false; }
  Status reserve(const StepReserve&) override { return ok_status(); }  // the executor takes what a step needs

  Result<Buffer> allocate(size_t bytes) override {
    NFP_ASSIGN_OR_RETURN(cpu::Mapping mapping, cpu::Mapping::create(bytes));
    void* data = mapping.data();
    buffers_.push_back(std::move(mapping));
    return Buffer(this, data, bytes);
  }
  void free(void* data, size_t) override {
    flush();
    const auto found = std::find_if(buffers_.begin(), buffers_.end(),
                                    [&](const cpu::Mapping& mapping) { return mapping.data() == data; });
    assert(found != buffers_.end());
    std::swap(*found, buffers_.back());
    buffers_.pop_back();
  }
  Status upload(void* dst, const void* src, size_t bytes) override {
    flush();
    if (bytes > 0) std::memcpy(dst, src, bytes);
    return ok_status();
  }
  Status download(void* dst, const void* src, size_t bytes) override {
    NFP_RETURN_IF_ERROR(synchronize());
    if (bytes > 0) std::memcpy(dst, src, bytes);
    return ok_status();
  }
  Status synchronize() override {
    flush();
    return failure();
  }

  Result<Buffer> allocate_host(size_t bytes) override { return allocate(bytes); }
  void copy(const CopyArgs& args) override { append(args); }
  Result<std::unique_ptr<Event>> make_event() override { return std::unique_ptr<Event>(std::make_unique<CpuEvent>()); }
  void record(Event& event) override { static_cast<CpuEvent&>(event).after = done_ + pending_.size(); }
  Status wait(Event& event) override {
    const uint64_t after = static_cast<CpuEvent&>(event).after;
    if (after > done_) flush(static_cast<size_t>(after - done_));
    return failure();
  }

  DType activation_dtype() const override { return DType::kF32; }
  size_t activation_bytes(int64_t rows, int64_t features) const override {
    return static_cast<size_t>(rows) * static_cast<size_t>(features) * sizeof(float);
  }

  Result<std::unique_ptr<LinearWeight>> make_linear(const LinearSpec& spec) override {
    flush();
    return cpu::PackedWeight::pack(spec, arena_, threads_);
  }
  Result<std::unique_ptr<KvCache>> make_kv_cache(const KvCacheSpec& spec) override {
    NFP_ASSIGN_OR_RETURN(auto cache, cpu::CpuKvCache::create(spec));
    return std::unique_ptr<KvCache>(std::move(cache));
  }
  size_t kv_bytes_per_block(const KvCacheSpec& spec) const override { return cpu::CpuKvCache::bytes_per_block(spec); }
  Result<std::unique_ptr<TokenHistory>> make_token_history(int32_t slots, int32_t vocab) override {
    NFP_ASSIGN_OR_RETURN(auto history, cpu::CpuTokenHistory::create(slots, vocab));
    return std::unique_ptr<TokenHistory>(std::move(history));
  }
  Status reset_history(TokenHistory& history, int32_t slot, std::span<const int32_t> prompt,
                       std::span<const int32_t> output) override {
    flush();
    return static_cast<cpu::CpuTokenHistory&>(history).reset(slot, prompt, output);
  }

  void embed(const EmbedArgs& args) override { append(args); }
  void rms_norm(const RmsNormArgs& args) override { append(args); }
  void linear(const LinearArgs& args) override {
    assert(args.epilogue != Epilogue::kGatedActivation ||
           static_cast<const cpu::PackedWeight*>(args.weight)->interleaved());
    append(args);
  }
  void rope(const RopeArgs& args) override { append(args); }
  void attention(const AttentionArgs& args) override { append(args); }
  void route(const RouteArgs& args) override { append(args); }
  void expert_linear(const ExpertLinearArgs& args) override { append(args); }
  void combine_experts(const CombineExpertsArgs& args) override { append(args); }
  void gather_rows(const GatherRowsArgs& args) override { append(args); }
  void sample(const SampleArgs& args) override { append(args); }
  void score(const ScoreArgs& args) override {
    assert(args.top_n >= 0 && args.top_n <= kMaxTopLogprobs);
    append(args);
  }

  Status begin_capture() override {
    flush();
    assert(!capturing_);
    capturing_ = true;
    return ok_status();
  }
  Result<std::unique_ptr<Graph>> end_capture() override {
    assert(capturing_);
    capturing_ = false;
    return std::unique_ptr<Graph>(std::make_unique<CpuGraph>(std::exchange(pending_, {})));
  }
  Status replay(Graph& graph) override {
    assert(!capturing_);
    const std::vector<Operation>& operations = static_cast<CpuGraph&>(graph).operations;
    pending_.insert(pending_.end(), operations.begin(), operations.end());
    return ok_status();
  }

  void set_profiling(bool on) override {
    flush();
    executor_.set_profiling(on);
  }
  bool profiling() const override { return false; }  // a replayed step is a list of operations like any other
  std::vector<StageTime> profile() const override { return executor_.profile(); }

 private:
  template <typename Args>
  void append(const Args& args) {
    pending_.emplace_back(args);
  }
  // Runs what is recorded, or the first `count` operations of it. While capturing nothing may wait: the list is the
  // graph's.
  void flush(size_t count = SIZE_MAX) {
    if (capturing_ || pending_.empty()) return;
    count = std::min(count, pending_.size());
    Status status = executor_.run(std::span(pending_).first(count));
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(count));
    done_ += count;
    if (!status.ok() && !failure_) failure_ = std::move(status).error();
  }
  Status failure() {
    if (!failure_) return ok_status();
    return *std::exchange(failure_, std::nullopt);
  }

  BackendInfo info_;
  ThreadPool threads_;
  cpu::Executor executor_;
  cpu::Arena arena_;
  std::vector<cpu::Mapping> buffers_;
  std::vector<Operation> pending_;
  uint64_t done_ = 0;  // operations run so far
  bool capturing_ = false;
  std::optional<Error> failure_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuOptions& options) {
  if (options.threads < 0 || options.threads > 4096) {
    return error(ErrorCode::kUsage, "--threads is {}; use 1 to 4096, or 0 for all", options.threads);
  }
  NFP_ASSIGN_OR_RETURN(const InstructionSet set, choose_instruction_set(options.kernels));
  const KernelTable& kernels = cpu::kernels_of(set);
  const std::vector<CpuPlace> places = usable_cpus();
  int threads = options.threads;
  if (threads == 0) {
    NFP_ASSIGN_OR_RETURN(threads, cpu::choose_thread_count(places, kernels));
  }
  const int nodes = count_nodes(places);
  // With several memory nodes a thread must stay where its share of the weights is.
  const bool pin = options.pin || nodes > 1;
  // Where every CPU has a thread, any other that runs for a moment can leave two of them on one CPU for longer than it
  // ran, and a step lasts twice as long. Bound to theirs they stay apart. Not the caller, for whom one CPU is left.
  const bool full = threads > 1 && static_cast<size_t>(threads) == places.size();
  std::vector<std::vector<int>> cpus;
  if (pin || full) cpus = thread_bounds(places, threads);
  if (!pin && full) cpus[0].clear();
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(kernels, threads, std::move(cpus), nodes));
}

}  // namespace nfp
