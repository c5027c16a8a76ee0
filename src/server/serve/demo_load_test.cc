#include "server/serve/demo_load.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>

#include "engine/testing/scripted_runner.h"

namespace nfp::server {
namespace {

// At a server's end the load is gone before the engine that its last requests are in.
TEST(DemoLoad, ItsRequestsMayOutliveIt) {
  ScriptedRunner runner(100, 1000, {}, std::chrono::milliseconds(5));
  EngineConfig config;
  config.kv_blocks = 1024;
  auto engine = std::make_unique<EngineThread>(
      std::make_unique<Engine>(config, &runner, nullptr, std::move(parse_policy("fp16").value())));
  alignas(DemoLoad) std::array<std::byte, sizeof(DemoLoad)> place;
  auto* const load = new (place.data()) DemoLoad(*engine, runner.vocab(), runner.max_context());
  load->set_rate(DemoLoad::kMostRate);
  while (engine->stats().running == 0) std::this_thread::yield();
  load->~DemoLoad();
  place.fill(std::byte{0xab});
  const auto left = place;
  EXPECT_GT(engine->stats().running, 0);
  engine.reset();  // ends them
  EXPECT_EQ(place, left);
}

}  // namespace
}  // namespace nfp::server
