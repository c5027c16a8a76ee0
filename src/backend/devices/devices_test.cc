#include "backend/devices/devices.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "base/testing/scratch_folder.h"

namespace nfp {
namespace {

TEST(Devices, AnUnknownNameIsRefusedWithTheNamesThatThereAre) {
  const auto backend = make_backend("tpu", {});
  ASSERT_FALSE(backend.ok());
  EXPECT_EQ(backend.error().code, ErrorCode::kUsage);
  for (const std::string& name : device_names()) EXPECT_NE(backend.error().message.find(name), std::string::npos);
  EXPECT_EQ(backend.error().message.find("--"), std::string::npos);  // told to callers of the libraries, too
}

TEST(Devices, AutoAlwaysFindsOne) {
  const auto backend = make_backend("auto", {.threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.error().message;
  EXPECT_EQ(computed_precision(**backend, Precision::kFp16), Precision::kFp16);
  EXPECT_TRUE((*backend)->supports(computed_precision(**backend, Precision::kFp8)));
}

TEST(Devices, AMissingGpuIsAnErrorThatSaysWhatToDo) {
  const auto backend = make_backend("cuda", {});
  if (backend.ok()) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(backend.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(backend.error().message.find("--device cpu"), std::string::npos);
}

// A warning that callers of the libraries read, too, who have no flags.
TEST(Devices, AutoTellsThatChoicesOfKernelsAreOfNoUse) {
  if (make_backend("cuda", {}).ok()) GTEST_SKIP() << "there is a GPU";
  const nfp::testing::ScratchFolder folder;
  const std::string file = folder.path() + "/h200.json";
  std::ofstream(file) << R"({"format": "nestedfp gemm choices 2", "models": {}, "choices": []})";
  ::testing::internal::CaptureStderr();
  const auto backend = make_backend("auto", {.threads = 1, .gemm_choices = file});
  const std::string told = ::testing::internal::GetCapturedStderr();
  ASSERT_TRUE(backend.ok()) << backend.error().message;
  EXPECT_NE(told.find("'" + file + "' are not used: "), std::string::npos) << told;
  EXPECT_EQ(told.find("--"), std::string::npos) << told;
}

}  // namespace
}  // namespace nfp
