// Operators of PyTorch, called as its dispatcher calls them. What products compute is tested where there is a GPU
// (tests/vllm/test_op.py); here: whose tensors are whose, and what goes wrong.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <string>
#include <utility>

#include "capi/testing/torch_of_tests.h"
#include "nestedfp_torch.h"

namespace nfp::capi {
namespace {

constexpr int32_t kF16 = 5, kF32 = 6, kU8 = 0;  // torch_of_tests' dtypes

StableValue of(TensorHandle tensor) { return reinterpret_cast<StableValue>(tensor); }
StableValue optional(TensorHandle tensor) { return reinterpret_cast<StableValue>(new StableValue(of(tensor))); }

class TorchOps : public ::testing::Test {
 protected:
  // Once it is bound, other paths change nothing any more.
  static void SetUpTestSuite() {
    EXPECT_EQ(nfp_torch_bind(nullptr, "x"), NFP_USAGE);
    EXPECT_EQ(nfp_torch_bind("/nowhere/libtorch_cpu.so", NFP_TORCH_OF_TESTS), NFP_UNSUPPORTED);
    EXPECT_NE(std::string(nfp_last_error()).find("/nowhere/libtorch_cpu.so"), std::string::npos);
    EXPECT_EQ(nfp_torch_bind("libm.so.6", NFP_TORCH_OF_TESTS), NFP_UNSUPPORTED);
    EXPECT_NE(std::string(nfp_last_error()).find("aoti_torch_get_data_ptr"), std::string::npos);
  }
  void SetUp() override {
    ASSERT_EQ(nfp_torch_bind(NFP_TORCH_OF_TESTS, NFP_TORCH_OF_TESTS), NFP_OK) << nfp_last_error();
    torch_of_tests_forget_failure();
    live_ = torch_of_tests_live();
  }
  // The operator takes over what is on its stack.
  std::string call(const char* name, StableValue* stack, uint64_t inputs, uint64_t outputs) {
    torch_of_tests_kernel(name)(stack, inputs, outputs);
    return torch_of_tests_failure();
  }
  std::array<StableValue, 13> norm_linear(int64_t rows, int64_t residual_rows, int32_t dtype = kF16,
                                          bool reduce = false) {
    return {of(torch_of_tests_tensor(rows, 64, dtype)),
            of(torch_of_tests_tensor(residual_rows, 64, dtype)),
            of(torch_of_tests_tensor(1, 64, dtype)),
            std::bit_cast<StableValue>(1e-5),
            of(torch_of_tests_tensor(1, 4096, kU8)),
            of(torch_of_tests_tensor(1, 4096, kU8)),
            of(torch_of_tests_tensor(1, 128, kF32)),
            optional(torch_of_tests_tensor(1, 128, dtype)),
            128,
            64,
            0,
            0,
            reduce ? StableValue{1} : StableValue{0}};
  }
  std::array<StableValue, 5> norm(int64_t rows, int64_t residual_rows, bool reduce, int32_t dtype = kF16) {
    return {of(torch_of_tests_tensor(rows, 64, dtype)), of(torch_of_tests_tensor(residual_rows, 64, dtype)),
            of(torch_of_tests_tensor(1, 64, dtype)), std::bit_cast<StableValue>(1e-5),
            reduce ? StableValue{1} : StableValue{0}};
  }
  int64_t live_ = 0;
};

TEST_F(TorchOps, NoRowsGiveEmptyResults) {
  auto stack = norm_linear(0, 0);
  EXPECT_EQ(call("norm_linear", stack.data(), stack.size(), 2), "");
  const auto y = reinterpret_cast<TensorHandle>(stack[0]), h = reinterpret_cast<TensorHandle>(stack[1]);
  EXPECT_EQ(torch_of_tests_sizes(y)[0], 0);
  EXPECT_EQ(torch_of_tests_sizes(y)[1], 128);
  EXPECT_EQ(torch_of_tests_sizes(h)[1], 64);
  EXPECT_EQ(torch_of_tests_live(), live_ + 2);  // the results are the caller's, the arguments are gone
  aoti_torch_delete_tensor_object(y);
  aoti_torch_delete_tensor_object(h);
  auto normed = norm(0, 0, true);
  nfp_torch_set_all_reduce(0, nullptr);  // which nothing is asked of here
  EXPECT_EQ(call("norm", normed.data(), normed.size(), 2), "");
  for (const StableValue made : {normed[0], normed[1]}) {
    const auto tensor = reinterpret_cast<TensorHandle>(made);
    EXPECT_EQ(torch_of_tests_sizes(tensor)[1], 64);
    aoti_torch_delete_tensor_object(tensor);
  }
  auto swiglu = std::array<StableValue, 7>{of(torch_of_tests_tensor(0, 64, kF16)),
                                           of(torch_of_tests_tensor(1, 4096, kU8)),
                                           of(torch_of_tests_tensor(1, 4096, kU8)),
                                           of(torch_of_tests_tensor(1, 0, kF32)),
                                           128,
                                           64,
                                           0};
  EXPECT_EQ(call("swiglu", swiglu.data(), swiglu.size(), 1), "");
  const auto activated = reinterpret_cast<TensorHandle>(swiglu[0]);
  EXPECT_EQ(torch_of_tests_sizes(activated)[1], 64);
  aoti_torch_delete_tensor_object(activated);
  EXPECT_EQ(torch_of_tests_live(), live_);
}

// What is on an operator's stack is the operator's, behind a C interface that the analyzer does not see through.
// NOLINTBEGIN(clang-analyzer-cplusplus.NewDeleteLeaks)
TEST_F(TorchOps, FailuresSayWhyAndKeepNothing) {
  auto other_rows = norm_linear(3, 2);
  EXPECT_NE(call("norm_linear", other_rows.data(), other_rows.size(), 2).find("different numbers of rows"),
            std::string::npos);
  auto wide = norm_linear(3, 3, kF32);
  EXPECT_NE(call("norm_linear", wide.data(), wide.size(), 2).find("FP16 or BF16"), std::string::npos);
  auto no_device = norm_linear(3, 3);
  EXPECT_NE(call("norm_linear", no_device.data(), no_device.size(), 2).find("nfp_torch_set_device(0)"),
            std::string::npos);
  auto no_group = norm_linear(3, 3, kF16, true);
  EXPECT_NE(call("norm_linear", no_group.data(), no_group.size(), 2).find("nfp_torch_set_all_reduce(0)"),
            std::string::npos);
  const std::array<std::pair<std::array<StableValue, 5>, const char*>, 3> norms{
      {{norm(3, 2, false), "different numbers of rows"},
       {norm(3, 3, false, kF32), "FP16 or BF16"},
       {norm(3, 3, true), "nfp_torch_set_device(0)"}}};
  for (auto [given, wanted] : norms) {
    const std::string said = call("norm", given.data(), given.size(), 2);
    EXPECT_NE(said.find(wanted), std::string::npos) << said;
  }
  auto other_weight = norm(3, 3, false);
  aoti_torch_delete_tensor_object(reinterpret_cast<TensorHandle>(other_weight[2]));
  other_weight[2] = of(torch_of_tests_tensor(1, 64, kF32));
  const std::string said = call("norm", other_weight.data(), other_weight.size(), 2);
  EXPECT_NE(said.find("the norm's weight must be [64] of the activations' type"), std::string::npos) << said;
  std::array<StableValue, 8> linear{of(torch_of_tests_tensor(3, 32, kF16)),
                                    of(torch_of_tests_tensor(1, 4096, kU8)),
                                    of(torch_of_tests_tensor(1, 4096, kU8)),
                                    of(torch_of_tests_tensor(1, 0, kF32)),
                                    0,
                                    128,
                                    64,
                                    0};
  EXPECT_NE(call("linear", linear.data(), linear.size(), 1).find("[m, 64]"), std::string::npos);
  EXPECT_EQ(torch_of_tests_live(), live_);
}

TEST_F(TorchOps, OperandsAreOnOneDevice) {
  int not_asked = 0;  // nothing of it is looked at before the operands
  ASSERT_EQ(nfp_torch_set_device(1, reinterpret_cast<nfp_gpu*>(&not_asked), &not_asked, sizeof(not_asked), 0), NFP_OK);
  const auto move = [](StableValue tensor, int32_t device) {
    torch_of_tests_on(device, reinterpret_cast<TensorHandle>(tensor));
  };
  constexpr std::array<size_t, 6> kTensors{0, 1, 2, 4, 5, 6};  // x, residual, norm's weight, upper, lower, scale
  for (const size_t apart : kTensors) {
    for (const int32_t device : {0, -1}) {  // another GPU, the host
      if (apart == 0 && device == -1) continue;
      auto stack = norm_linear(3, 3);
      for (const size_t tensor : kTensors) move(stack[tensor], tensor == apart ? device : 1);
      const std::string said = call("norm_linear", stack.data(), stack.size(), 2);
      EXPECT_NE(said.find(apart == 0 ? "must be on the activations' device, cuda:0"
                                     : "must be on the activations' device, cuda:1"),
                std::string::npos)
          << apart << ": " << said;
    }
  }
  EXPECT_EQ(torch_of_tests_live(), live_);
}
// NOLINTEND(clang-analyzer-cplusplus.NewDeleteLeaks)

TEST_F(TorchOps, DevicesAreChecked) {
  EXPECT_EQ(nfp_torch_set_device(0, nullptr, nullptr, 0, 0), NFP_USAGE);
  EXPECT_EQ(nfp_torch_set_device(64, reinterpret_cast<nfp_gpu*>(&live_), &live_, 8, 0), NFP_USAGE);
  EXPECT_EQ(nfp_torch_set_all_reduce(64, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_torch_set_all_reduce(0, nullptr), NFP_OK);
  EXPECT_EQ(nfp_torch_refresh(-1, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_torch_refresh(64, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_torch_refresh(0, nullptr), NFP_OK);  // nothing was seen
  nfp_torch_forget(-1);
  nfp_torch_forget(0);
}

}  // namespace
}  // namespace nfp::capi
