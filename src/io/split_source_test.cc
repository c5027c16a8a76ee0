#include "io/split_source.h"

#include <gtest/gtest.h>

#include <cstring>

#include "io/model_source.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

using testing::random_tensor;
using testing::TestTensor;

// Heads of 2 x 16 rows for q, 16 for k and v each.
constexpr const char* kConfig = R"({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 32,
 "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
 "vocab_size": 50})";

class SplitSourceTest : public testing::ScratchTest {
 protected:
  Result<std::shared_ptr<const ModelSource>> split(const std::vector<TestTensor>& tensors) {
    testing::write_model(path("m"), tensors);
    EXPECT_TRUE(write_file(path("m/config.json"), kConfig).ok());
    auto source = ModelSource::open(path("m"));
    if (!source.ok()) return source.error();
    return split_fused(std::move(source).value());
  }
  // Rows first .. of `whole`.
  static void expect_rows(const ModelSource& source, const std::string& name, const TestTensor& whole, int64_t first,
                          int64_t rows) {
    const TensorInfo* part = source.find(name);
    ASSERT_NE(part, nullptr) << name;
    EXPECT_EQ(part->shape, (Shape{rows, whole.shape[1]})) << name;
    const size_t row = whole.bytes.size() / static_cast<size_t>(whole.shape[0]);
    std::string bytes(row * static_cast<size_t>(rows), '\0');
    ASSERT_TRUE(source.read_rows(*part, 0, rows, reinterpret_cast<std::byte*>(bytes.data())).ok()) << name;
    EXPECT_EQ(bytes, whole.bytes.substr(static_cast<size_t>(first) * row, bytes.size())) << name;
    source.release(*part);
  }
};

TEST_F(SplitSourceTest, PartsAreRowsOfTheWhole) {
  const std::string layer = "model.layers.0.";
  const auto qkv = random_tensor(layer + "self_attn.qkv_proj.weight", DType::kF16, {64, 32}, 1);
  const auto gate_up = random_tensor(layer + "mlp.gate_up_proj.weight", DType::kF16, {96, 32}, 2);
  const auto down = random_tensor(layer + "mlp.down_proj.weight", DType::kF16, {32, 48}, 3);
  const auto source = split({qkv, gate_up, down});
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->tensors().size(), 6u);
  expect_rows(**source, layer + "self_attn.q_proj.weight", qkv, 0, 32);
  expect_rows(**source, layer + "self_attn.k_proj.weight", qkv, 32, 16);
  expect_rows(**source, layer + "self_attn.v_proj.weight", qkv, 48, 16);
  expect_rows(**source, layer + "mlp.gate_proj.weight", gate_up, 0, 48);
  expect_rows(**source, layer + "mlp.up_proj.weight", gate_up, 48, 48);
  expect_rows(**source, layer + "mlp.down_proj.weight", down, 0, 32);
}

TEST_F(SplitSourceTest, LayersSpelledInTwoWaysStayApart) {
  const auto one = random_tensor("model.layers.0.mlp.gate_up_proj.weight", DType::kF16, {2, 32}, 1);
  const auto other = random_tensor("model.layers.00.mlp.gate_up_proj.weight", DType::kF16, {2000, 32}, 2);
  const auto source = split({one, other});
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->tensors().size(), 4u);
  expect_rows(**source, "model.layers.0.mlp.up_proj.weight", one, 1, 1);
  expect_rows(**source, "model.layers.00.mlp.up_proj.weight", other, 1000, 1000);
}

// The plain tensor's shape with the fused one's rows wrote past the end of a buffer.
TEST_F(SplitSourceTest, ATensorNamedLikeAPartIsRefused) {
  for (const char* part : {"mlp.gate_proj", "mlp.up_proj", "self_attn.v_proj"}) {
    const std::string name = std::string("model.layers.0.") + part + ".weight";
    const auto source = split({random_tensor(name, DType::kF16, {64, 2}, 1),
                               random_tensor("model.layers.0.mlp.gate_up_proj.weight", DType::kF16, {128, 512}, 2),
                               random_tensor("model.layers.0.self_attn.qkv_proj.weight", DType::kF16, {64, 512}, 3)});
    ASSERT_FALSE(source.ok()) << part;
    EXPECT_NE(source.error().message.find("'" + name + "'"), std::string::npos) << source.error().message;
    EXPECT_EQ(source.error().message.find(path("m")), 0u) << source.error().message;
  }
}

TEST_F(SplitSourceTest, AnEmptyMatrixIsRefused) {
  for (const char* whole : {"mlp.gate_up_proj", "self_attn.qkv_proj"}) {
    const std::string name = std::string("model.layers.0.") + whole + ".weight";
    const auto source =
        split({random_tensor("model.embed_tokens.weight", DType::kF16, {50, 32}, 1), {name, DType::kF16, {0, 32}, ""}});
    ASSERT_FALSE(source.ok()) << whole;
    EXPECT_NE(source.error().message.find("'" + name + "' is empty"), std::string::npos) << source.error().message;
  }
}

// 30 rows are not those of the configuration's heads, and 3 no two halves.
TEST_F(SplitSourceTest, OtherRowsStayTogether) {
  const auto source = split({random_tensor("model.layers.0.self_attn.qkv_proj.weight", DType::kF16, {30, 32}, 1),
                             random_tensor("model.layers.0.mlp.gate_up_proj.weight", DType::kF16, {3, 32}, 2)});
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->tensors().size(), 2u);
  EXPECT_TRUE((*source)->has("model.layers.0.mlp.gate_up_proj.weight"));
}

}  // namespace
}  // namespace nfp
