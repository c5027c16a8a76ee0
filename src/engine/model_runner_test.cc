#include "engine/model_runner.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

namespace nfp {
namespace {

class NoKeys final : public KvCache {
 public:
  explicit NoKeys(const KvCacheSpec& spec) : spec_(spec) {}
  const KvCacheSpec& spec() const override { return spec_; }
  size_t bytes() const override { return 0; }

 private:
  KvCacheSpec spec_;
};

// A device with memory of its own, which computes nothing.
class MemoryOnly : public Backend {
 public:
  explicit MemoryOnly(uint64_t total, uint64_t others = 0) : total_(total), others_(others) {}

  uint64_t taken() const { return taken_; }
  int waits() const { return waits_; }

  const BackendInfo& info() const override { return info_; }
  bool supports(Precision) const override { return true; }
  bool prefers_graphs() const override { return false; }
  Status reserve(const StepReserve&) override { return ok_status(); }
  std::optional<DeviceMemory> memory() const override {
    return DeviceMemory{total_, total_ - others_ - taken_, others_};
  }
  Result<Buffer> allocate(size_t bytes) override {
    taken_ += bytes;
    return Buffer(this, std::calloc(1, 1), bytes);
  }
  void free(void* data, size_t bytes) override {
    std::free(data);
    taken_ -= bytes;
  }
  Result<Buffer> allocate_host(size_t) override { return Buffer(); }
  Status upload(void*, const void*, size_t) override { return ok_status(); }
  Status download(void*, const void*, size_t) override { return ok_status(); }
  Status synchronize() override { return ok_status(); }
  void copy(const CopyArgs&) override {}
  Result<std::unique_ptr<Event>> make_event() override { return std::make_unique<Event>(); }
  void record(Event&) override {}
  Status wait(Event&) override {
    ++waits_;
    return ok_status();
  }
  DType activation_dtype() const override { return DType::kF16; }
  size_t activation_bytes(int64_t rows, int64_t features) const override {
    return static_cast<size_t>(rows * features) * 2;
  }
  Result<std::unique_ptr<LinearWeight>> make_linear(const LinearSpec&) override {
    return std::unique_ptr<LinearWeight>();
  }
  Result<std::unique_ptr<KvCache>> make_kv_cache(const KvCacheSpec& spec) override {
    taken_ += kv_bytes_per_block(spec) * static_cast<uint64_t>(spec.blocks);
    return std::unique_ptr<KvCache>(std::make_unique<NoKeys>(spec));
  }
  size_t kv_bytes_per_block(const KvCacheSpec&) const override { return 4096; }
  Result<std::unique_ptr<TokenHistory>> make_token_history(int32_t, int32_t) override {
    return std::unique_ptr<TokenHistory>();
  }
  Status reset_history(TokenHistory&, int32_t, std::span<const int32_t>, std::span<const int32_t>) override {
    return ok_status();
  }
  void embed(const EmbedArgs&) override {}
  void rms_norm(const RmsNormArgs&) override {}
  void linear(const LinearArgs&) override {}
  void rope(const RopeArgs&) override {}
  void attention(const AttentionArgs&) override {}
  void route(const RouteArgs&) override {}
  void expert_linear(const ExpertLinearArgs&) override {}
  void combine_experts(const CombineExpertsArgs&) override {}
  void gather_rows(const GatherRowsArgs&) override {}
  void sample(const SampleArgs&) override {}
  void score(const ScoreArgs&) override {}
  Status begin_capture() override { return ok_status(); }
  Result<std::unique_ptr<Graph>> end_capture() override { return std::unique_ptr<Graph>(); }
  Status replay(Graph&) override { return ok_status(); }
  void set_profiling(bool) override {}
  bool profiling() const override { return false; }
  std::vector<StageTime> profile() const override { return {}; }

 private:
  BackendInfo info_;
  uint64_t total_, others_;
  uint64_t taken_ = 0;
  int waits_ = 0;
};

// And with memory of the host.
class BothMemories : public MemoryOnly {
 public:
  using MemoryOnly::MemoryOnly;
  Result<Buffer> allocate(size_t bytes) override { return Buffer(this, std::calloc(bytes, 1), bytes); }
  Result<Buffer> allocate_host(size_t bytes) override { return allocate(bytes); }
  void free(void* data, size_t) override { std::free(data); }
};

class NoWeights : public Model {
 public:
  explicit NoWeights(Backend& backend) : backend_(backend) {
    config_.vocab = 1000;
    config_.max_context = 1 << 20;
  }
  const ModelConfig& config() const override { return config_; }
  Backend& backend() const override { return backend_; }
  Status reserve(int32_t, int32_t, int32_t) override { return ok_status(); }
  void forward(const ForwardArgs&) override {}
  void logits(const int32_t*, int32_t, Precision, float*) override {}
  void sample(const int32_t*, Precision, float*, SampleArgs) override {}
  const Buffer& final_states(const int32_t*, int32_t) override { return none_; }
  const Buffer& hidden() const override { return none_; }
  std::vector<Linear*> linears() override { return {}; }
  Status reload(int32_t, WeightLoader&) override { return ok_status(); }
  KvCacheSpec kv_spec(int64_t blocks, int32_t, DType) const override { return {.blocks = blocks}; }
  size_t weight_bytes() const override { return 0; }

 private:
  Backend& backend_;
  ModelConfig config_;
  Buffer none_;
};

// With a million tokens of context the block tables of 4096 sequences are 1 GiB.
TEST(ModelRunner, TheCacheLeavesRoomForTheArraysOfAStep) {
  constexpr uint64_t kTotal = uint64_t{8} << 30;
  MemoryOnly device(kTotal);
  NoWeights model(device);
  EngineConfig config;
  config.max_context = 1 << 20;
  config.limits.max_sequences = 4096;
  config.limits.max_step_tokens = 4096;
  config.memory_share = 0.5;
  const auto runner = ModelRunner::create(model, config);
  ASSERT_TRUE(runner.ok()) << runner.error().message;
  EXPECT_GT((*runner)->config().kv_blocks, 0);
  EXPECT_LE(device.taken(), kTotal / 2);
}

TEST(ModelRunner, TheShareOfMemoryIsThisProgramsOwn) {
  constexpr uint64_t kTotal = uint64_t{8} << 30, kLeast = kTotal * 3 / 10;
  const auto taken = [](uint64_t others, double share) {
    MemoryOnly device(kTotal, others);
    NoWeights model(device);
    EngineConfig config;
    config.memory_share = share;
    const auto runner = ModelRunner::create(model, config);
    EXPECT_TRUE(runner.ok()) << runner.error().message;
    return device.taken();
  };
  // Two servers on one device, each with four tenths of it.
  EXPECT_GT(taken(0, 0.4), kLeast);
  EXPECT_LE(taken(0, 0.4), kTotal * 4 / 10);
  EXPECT_EQ(taken(kTotal * 4 / 10, 0.4), taken(0, 0.4));
  // More than others leave is not to be had.
  EXPECT_LT(taken(kTotal / 2, 0.9), kTotal / 2);
  EXPECT_GT(taken(kTotal / 2, 0.9), kLeast);
}

TEST(ModelRunner, TooLittleMemorySaysWhoHasIt) {
  MemoryOnly device(uint64_t{8} << 30, uint64_t{15} << 29);
  NoWeights model(device);
  const auto runner = ModelRunner::create(model, {});
  ASSERT_FALSE(runner.ok());
  EXPECT_EQ(runner.error().code, ErrorCode::kResource);
  EXPECT_NE(runner.error().message.find("other programs and the driver have 7.5"), std::string::npos)
      << runner.error().message;
}

TEST(ModelRunner, TheContextIsTheModelsOrWhatTheCacheHolds) {
  const auto contexts = [](uint64_t memory, int32_t asked) -> std::pair<int32_t, int64_t> {
    MemoryOnly device(memory);
    NoWeights model(device);
    EngineConfig config;
    config.max_context = asked;
    config.limits.max_sequences = 2;
    const auto runner = ModelRunner::create(model, config);
    if (!runner.ok()) return {0, 0};
    const EngineConfig& made = (*runner)->config();
    EXPECT_EQ((*runner)->max_context(), made.max_context);
    return {made.max_context, int64_t{made.kv_blocks} * made.block_size};
  };
  EXPECT_EQ(contexts(uint64_t{8} << 30, 0).first, 1 << 20);
  const auto [context, cached] = contexts(uint64_t{1} << 30, 0);
  EXPECT_LT(context, 1 << 20);
  EXPECT_GE(context, kLeastContext);
  EXPECT_EQ(context, cached);
  // What was asked for there is room for, or it is an error.
  EXPECT_EQ(contexts(uint64_t{1} << 30, 5000).first, 5000);
  EXPECT_EQ(contexts(uint64_t{1} << 30, 1 << 20).first, 0);
}

TEST(ModelRunner, SequencesAreTheBackendsWhereNobodySays) {
  class Many : public MemoryOnly {
   public:
    using MemoryOnly::MemoryOnly;
    int32_t default_sequences() const override { return 77; }
  };
  Many device(uint64_t{8} << 30);
  NoWeights model(device);
  for (const int32_t asked : {0, 5}) {
    EngineConfig config;
    config.limits.max_sequences = asked;
    const auto runner = ModelRunner::create(model, config);
    ASSERT_TRUE(runner.ok()) << runner.error().message;
    EXPECT_EQ((*runner)->config().limits.max_sequences, asked > 0 ? asked : 77);
  }
}

TEST(ModelRunner, SpeculativeTokensHaveAMost) {
  for (const int32_t tokens : {-1, 0, kMaxDrafts, kMaxDrafts + 1}) {
    MemoryOnly device(uint64_t{8} << 30);
    NoWeights model(device);
    EngineConfig config;
    config.speculative_tokens = tokens;
    const auto runner = ModelRunner::create(model, config);
    EXPECT_EQ(runner.ok(), tokens >= 0 && tokens <= kMaxDrafts) << tokens;
    if (runner.ok()) continue;
    EXPECT_EQ(runner.error().code, ErrorCode::kUsage);
    EXPECT_EQ(runner.error().message,
              fmt::format("{} speculative tokens were asked for, and there may be 0 to 16", tokens));
  }
}

EngineConfig small_config() {
  EngineConfig config;
  config.max_context = 64;
  config.kv_blocks = 8;
  config.limits.max_sequences = 4;
  config.limits.max_step_tokens = 32;
  return config;
}

// A prompt of three tokens in the first block, of which those from `first` on are a step of their own.
struct OnePrompt {
  explicit OnePrompt(int32_t first = 0) {
    sequence.request.prompt = sequence.tokens = {1, 2, 3};
    sequence.blocks = {0};
    plan.tokens = 3 - first;
    plan.items.push_back({.sequence = &sequence, .first = first, .count = plan.tokens, .samples = true});
  }
  OnePrompt(const OnePrompt&) = delete;
  OnePrompt& operator=(const OnePrompt&) = delete;
  Sequence sequence;
  StepPlan plan;
};

class NoMemory final : public TokenConstraint {
 public:
  bool fill(std::span<uint32_t>) override { throw std::bad_alloc(); }
  bool accept(int32_t) override { return true; }
};

TEST(ModelRunner, AnExceptionWhileAStepIsPreparedIsTheStepsError) {
  BothMemories device(uint64_t{8} << 30);
  NoWeights model(device);
  const auto runner = ModelRunner::create(model, small_config());
  ASSERT_TRUE(runner.ok()) << runner.error().message;
  OnePrompt prompt;
  auto& [sequence, plan] = prompt;

  sequence.request.constraint = std::make_unique<NoMemory>();
  const int waits = device.waits();
  const auto refused = (*runner)->submit(plan, Precision::kFp16);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kResource);
  EXPECT_EQ(device.waits(), waits + 1);  // nothing of it is under way

  sequence.request.constraint.reset();
  const auto ticket = (*runner)->submit(plan, Precision::kFp16);
  ASSERT_TRUE(ticket.ok()) << ticket.error().message;
  const auto output = (*runner)->collect(*ticket);
  ASSERT_TRUE(output.ok()) << output.error().message;
  EXPECT_EQ(output->sampled.size(), 1u);
}

// Has hung: waiting without a limit would not return.
class Hung final : public BothMemories {
 public:
  using BothMemories::BothMemories;
  Status synchronize() override {
    EXPECT_FALSE(hangs) << "a wait without a limit";
    return ok_status();
  }
  Status wait(Event&) override { return error(ErrorCode::kDevice, "it hangs"); }
  bool hangs = false;
};

TEST(ModelRunner, AStepThatFailsOnADeviceThatHangsIsNotWaitedForWithoutLimit) {
  Hung device(uint64_t{8} << 30);
  NoWeights model(device);
  const auto runner = ModelRunner::create(model, small_config());
  ASSERT_TRUE(runner.ok()) << runner.error().message;
  OnePrompt prompt;
  prompt.sequence.request.constraint = std::make_unique<NoMemory>();
  device.hangs = true;
  const auto refused = (*runner)->submit(prompt.plan, Precision::kFp16);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kDevice);
  EXPECT_EQ(refused.error().message, "it hangs");
}

// Records steps, and fails as a GPU does where it is asked to wait while it records.
class Recorder final : public BothMemories {
 public:
  using BothMemories::BothMemories;
  bool prefers_graphs() const override { return true; }
  Status begin_capture() override {
    records_ = true;
    return ok_status();
  }
  Result<std::unique_ptr<Graph>> end_capture() override {
    records_ = false;
    return std::make_unique<Graph>();
  }
  Status wait(Event& event) override {
    if (records_) return error(ErrorCode::kDevice, "waiting while a step is captured");
    return BothMemories::wait(event);
  }
  bool records() const { return records_; }

 private:
  bool records_ = false;
};

class NoMemoryInCapture final : public NoWeights {
 public:
  explicit NoMemoryInCapture(Recorder& device) : NoWeights(device), device_(device) {}
  void forward(const ForwardArgs&) override {
    if (!device_.records()) return;
    if (fails-- > 0) throw std::bad_alloc();
    ++captured;
  }
  int fails = 1, captured = 0;

 private:
  Recorder& device_;
};

TEST(ModelRunner, AnExceptionInACaptureEndsTheStepAndNotTheDevice) {
  Recorder device(uint64_t{8} << 30);
  NoMemoryInCapture model(device);
  const auto runner = ModelRunner::create(model, small_config());
  ASSERT_TRUE(runner.ok()) << runner.error().message;
  const OnePrompt prompt(2);
  const auto run = [&]() -> Status {
    NFP_ASSIGN_OR_RETURN(const StepTicket ticket, (*runner)->submit(prompt.plan, Precision::kFp16));
    const auto output = (*runner)->collect(ticket);
    return output.ok() ? ok_status() : Status(output.error());
  };
  ASSERT_TRUE(run().ok());  // a shape is captured the second time
  const Status ended = run();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().code, ErrorCode::kResource) << ended.error().message;
  EXPECT_FALSE(device.records());
  const Status again = run();
  EXPECT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(model.captured, 1);
}

// Tells whether the turn is held.
class InTurns final : public BothMemories {
 public:
  using BothMemories::BothMemories;
  std::shared_ptr<void> turn() override {
    held = true;
    return {this, [this](void*) { held = false; }};
  }
  void copy(const CopyArgs&) override { in_turn = in_turn && held; }
  void record(Event&) override {
    ++steps;
    in_turn = in_turn && held;
  }
  bool held = false, in_turn = true;
  int steps = 0;
};

TEST(ModelRunner, AStepIsEnqueuedInTheBackendsTurn) {
  InTurns device(uint64_t{8} << 30);
  NoWeights model(device);
  const auto runner = ModelRunner::create(model, small_config());
  ASSERT_TRUE(runner.ok()) << runner.error().message;
  OnePrompt prompt;
  auto& [sequence, plan] = prompt;
  ASSERT_TRUE((*runner)->submit(plan, Precision::kFp16).ok());
  EXPECT_EQ(device.steps, 1);
  EXPECT_TRUE(device.in_turn);
  EXPECT_FALSE(device.held);  // others may have theirs while this one computes
  sequence.request.constraint = std::make_unique<NoMemory>();
  EXPECT_FALSE((*runner)->submit(plan, Precision::kFp16).ok());
  EXPECT_FALSE(device.held);
}

}  // namespace
}  // namespace nfp
