#include "engine/engine_thread.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

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

}  // namespace
}  // namespace nfp
