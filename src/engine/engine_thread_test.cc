#include "engine/engine_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "engine/testing/scripted_runner.h"

namespace nfp {
namespace {

std::unique_ptr<Engine> make_engine(StepRunner* runner, int32_t max_queue) {
  EngineConfig options;
  options.kv_blocks = 256;
  options.limits.max_queue = max_queue;
  options.block_size = 4;
  return std::make_unique<Engine>(options, runner, nullptr, std::move(parse_policy("alternate:2").value()));
}

Request request(const std::string& id, int32_t max_tokens) {
  Request r;
  r.id = id;
  r.prompt = {5, 6, 7};
  r.sampling.max_tokens = max_tokens;
  return r;
}

TEST(EngineThread, ManyThreadsGetTheirAnswers) {
  ScriptedRunner runner(100, 1000);
  EngineThread engine(make_engine(&runner, 1000));
  std::vector<std::thread> clients;
  clients.reserve(4);
  std::atomic<int> complete{0};
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 25; ++i) {
        std::promise<Usage> done;
        auto future = done.get_future();
        const Status status =
            engine.submit(request(std::to_string(c) + "-" + std::to_string(i), 9), [&done](RequestOutput&& output) {
              if (output.finish) done.set_value(output.usage);
            });
        ASSERT_TRUE(status.ok());
        if (future.get().completion_tokens == 9) ++complete;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(complete, 100);
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
}

TEST(EngineThread, CancelsAndRefusesAndStops) {
  ScriptedRunner runner(100, 1000, {}, std::chrono::milliseconds(2));
  std::promise<FinishReason> cancelled, left, duplicate;
  {
    EngineThread engine(make_engine(&runner, 2));
    const auto to = [](std::promise<FinishReason>& promise) {
      return [&promise](RequestOutput&& output) {
        if (output.finish) promise.set_value(*output.finish);
      };
    };
    ASSERT_TRUE(engine.submit(request("a", 500), to(cancelled)).ok());
    while (engine.stats().running == 0) std::this_thread::yield();
    ASSERT_TRUE(engine.submit(request("a", 5), to(duplicate)).ok());
    EXPECT_EQ(duplicate.get_future().get(), FinishReason::kError);
    engine.cancel("a");
    EXPECT_EQ(cancelled.get_future().get(), FinishReason::kCancelled);
    EXPECT_GT(engine.stats().steps, 0u);
    EXPECT_LT(engine.seconds_since_progress(), 60.0);
    const int64_t before = engine.progress();
    while (engine.progress() == before) std::this_thread::yield();  // an idle engine moves too
    ASSERT_TRUE(engine.submit(request("left", 900), to(left)).ok());
  }
  EXPECT_EQ(left.get_future().get(), FinishReason::kCancelled);
}

TEST(EngineThread, AFullQueueIsRefusedAtOnce) {
  ScriptedRunner runner(100, 1000, {}, std::chrono::milliseconds(50));
  EngineThread engine(make_engine(&runner, 1));
  const OutputSink ignore = [](RequestOutput&&) {};
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    const Status status = engine.submit(request(std::to_string(i), 500), ignore);
    if (!status.ok() && status.error().code == ErrorCode::kResource) ++refused;
  }
  EXPECT_GT(refused, 0);
}

RequestOutput wait_for(EngineThread& engine, Request asked) {
  std::promise<RequestOutput> last;
  const Status taken = engine.submit(std::move(asked), [&](RequestOutput&& output) {
    if (output.finish) last.set_value(std::move(output));
  });
  EXPECT_TRUE(taken.ok());
  return last.get_future().get();
}

TEST(EngineThread, ASinkThatThrowsEndsItsOwnRequest) {
  ScriptedRunner runner(100, 1000, {}, std::chrono::milliseconds(1));
  EngineThread engine(make_engine(&runner, 8));
  std::promise<void> dropped;
  struct Gone {
    std::promise<void>* dropped;
    explicit Gone(std::promise<void>* d) : dropped(d) {}
    ~Gone() { dropped->set_value(); }
  };
  const Status taken = engine.submit(
      request("a", 900), [kept = std::make_shared<Gone>(&dropped)](RequestOutput&&) { throw std::bad_alloc(); });
  ASSERT_TRUE(taken.ok());
  dropped.get_future().get();
  EXPECT_EQ(wait_for(engine, request("b", 5)).finish, FinishReason::kLength);
  EXPECT_EQ(engine.stats().running, 0);  // "a" is not computed for nobody
  EXPECT_FALSE(engine.failed());
}

class Throwing final : public EngineObserver {
 public:
  void on_step(const StepRecord& step) override {
    if (step.index == 3) throw std::bad_alloc();
  }
};

TEST(EngineThread, AnExceptionOutOfAStepEndsAllRequestsAndTells) {
  ScriptedRunner runner(100, 1000);
  Throwing observer;
  auto made = make_engine(&runner, 8);
  made->set_observer(&observer);
  std::promise<Error> told;
  EngineThread engine(std::move(made), [&](const Error& failure) { told.set_value(failure); });
  const RequestOutput ended = wait_for(engine, request("a", 900));
  EXPECT_EQ(ended.finish, FinishReason::kError);
  EXPECT_EQ(ended.error_code, ErrorCode::kDevice);
  EXPECT_NE(ended.error.find("bad_alloc"), std::string::npos) << ended.error;
  EXPECT_EQ(told.get_future().get().code, ErrorCode::kResource);
  EXPECT_TRUE(engine.failed());
  engine.cancel("a");
  for (const char* id : {"a", "b"}) {
    const RequestOutput refused = wait_for(engine, request(id, 5));
    EXPECT_EQ(refused.finish, FinishReason::kError);
    EXPECT_EQ(refused.error_code, ErrorCode::kDevice);
  }
  EXPECT_EQ(engine.stats().running, 0);
}

TEST(EngineThread, AnExceptionWhileARequestIsTakenInRefusesIt) {
  class Refusing final : public StepRunner {
   public:
    explicit Refusing(StepRunner& runner) : runner_(runner) {}
    int32_t vocab() const override { return runner_.vocab(); }
    // Of validate(), which sees a request first.
    int32_t max_context() const override {
      if (throws.exchange(false)) throw std::bad_alloc();
      return runner_.max_context();
    }
    int32_t max_in_flight() const override { return runner_.max_in_flight(); }
    Status start(const Sequence& sequence) override { return runner_.start(sequence); }
    Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
      return runner_.submit(plan, precision);
    }
    Result<StepOutput> collect(StepTicket ticket) override { return runner_.collect(ticket); }
    mutable std::atomic<bool> throws{false};

   private:
    StepRunner& runner_;
  };
  ScriptedRunner scripted(100, 1000);
  Refusing runner(scripted);
  EngineThread engine(make_engine(&runner, 8));
  runner.throws = true;
  EXPECT_EQ(wait_for(engine, request("a", 5)).error_code, ErrorCode::kResource);
  EXPECT_EQ(wait_for(engine, request("a", 5)).finish, FinishReason::kLength);
  EXPECT_FALSE(engine.failed());
}

}  // namespace
}  // namespace nfp
