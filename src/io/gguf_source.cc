// A GGUF file, seen as a Hugging Face model.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/float_types.h"
#include "base/mapped_file.h"
#include "io/gguf.h"
#include "io/gguf_tokenizer.h"
#include "io/sources.h"

namespace nfp {
namespace {

struct Name {
  std::string_view gguf, hf;
};

constexpr Name kOuterNames[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
    {"rope_freqs.weight", "rope_freqs.weight"},
};
constexpr Name kLayerNames[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},      {"attn_output", "self_attn.o_proj"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},           {"ffn_down", "mlp.down_proj"},
    {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
};

// "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; other names stay as they are.
std::string hf_name(const std::string& gguf) {
  for (const Name& name : kOuterNames) {
    if (gguf == name.gguf) return std::string(name.hf);
  }
  if (gguf.rfind("blk.", 0) != 0) return gguf;
  const size_t layer_end = gguf.find('.', 4);
  const size_t suffix = gguf.rfind('.');
  if (layer_end == std::string::npos || suffix <= layer_end) return gguf;
  const std::string_view part = std::string_view(gguf).substr(layer_end + 1, suffix - layer_end - 1);
  for (const Name& name : kLayerNames) {
    if (part == name.gguf) {
      return fmt::format("model.layers.{}.{}{}", gguf.substr(4, layer_end - 4), name.hf, gguf.substr(suffix));
    }
  }
  return gguf;
}

struct Architecture {
  std::string_view gguf;
  std::string_view hf_class, model_type;
  bool permuted_qk;  // the converter reorders the rows of q and k (interleaved rotation)
};
constexpr Architecture kArchitectures[] = {{"llama", "LlamaForCausalLM", "llama", true}};

class GgufSource final : public ModelSource {
 public:
  GgufSource(const std::string& path, MappedFile file) : ModelSource(SourceKind::kGguf, path), file_(std::move(file)) {}

  Status open_file() {
    NFP_ASSIGN_OR_RETURN(gguf_, parse_gguf(file_.bytes(), path_));
    const auto name = gguf_.text("general.architecture");
    if (!name) return error(ErrorCode::kInvalidInput, "{}: metadata 'general.architecture' is missing", path_);
    for (const Architecture& known : kArchitectures) {
      if (known.gguf == *name) architecture_ = &known;
    }
    if (architecture_ == nullptr) {
      return error(ErrorCode::kUnsupported, "{}: architecture '{}' is not supported in GGUF files; supported is llama",
                   path_, *name);
    }
    for (const GgufTensor& tensor : gguf_.tensors) {
      TensorInfo info;
      info.name = hf_name(tensor.name);
      info.dtype = tensor.type->type == GgmlType::kF32    ? DType::kF32
                   : tensor.type->type == GgmlType::kBF16 ? DType::kBF16
                                                          : DType::kF16;
      info.stored = std::string(tensor.type->name);
      info.shape = tensor.shape;
      info.file_bytes = tensor.bytes;
      if (!by_hf_name_.emplace(info.name, &tensor).second) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' appears twice", path_, tensor.name);
      }
      add_tensor(std::move(info));
    }
    NFP_RETURN_IF_ERROR(make_config());
    gguf_tokenizer_ = gguf_tokenizer_of(gguf_);
    return ok_status();
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const GgufTensor& stored = *by_hf_name_.at(tensor.name);
    const int64_t elements = tensor.row_elements();
    const int64_t blocks = elements / stored.type->block;
    const auto row_bytes = static_cast<size_t>(blocks * stored.type->bytes);
    const size_t out_bytes = static_cast<size_t>(elements) * size_of(tensor.dtype);
    const bool plain = tensor.dtype != DType::kF16 || stored.type->type == GgmlType::kF16;
    std::vector<float> values(plain ? 0 : static_cast<size_t>(elements));
    for (int64_t r = 0; r < count; ++r, out += out_bytes) {
      const auto row = static_cast<size_t>(stored_row(tensor, first + r));
      const std::byte* in = file_.bytes().data() + stored.begin + row * row_bytes;
      if (plain) {
        std::memcpy(out, in, row_bytes);
        continue;
      }
      stored.type->dequantize(in, blocks, values.data());
      auto* halves = reinterpret_cast<uint16_t*>(out);
      for (size_t i = 0; i < values.size(); ++i) halves[i] = fp32_to_fp16(values[i]);
    }
    return ok_status();
  }
  std::optional<std::string> tokenizer_gguf() const override {
    return gguf_tokenizer_ ? std::optional<std::string>(metadata_only(file_.bytes(), gguf_)) : std::nullopt;
  }
  void release(const TensorInfo& tensor) const override {
    const GgufTensor& stored = *by_hf_name_.at(tensor.name);
    file_.release(file_.bytes().subspan(stored.begin, stored.bytes));
  }

 private:
  std::string key(std::string_view suffix) const { return fmt::format("{}.{}", architecture_->gguf, suffix); }

  // The row of the file that holds row `row` of the Hugging Face matrix. llama.cpp's converter stores each head's rows
  // so that rotation pairs neighbours: file row 2i + h of a head is row i + h * head_dim / 2.
  int64_t stored_row(const TensorInfo& tensor, int64_t row) const {
    if (!architecture_->permuted_qk) return row;
    const bool q = tensor.name.find("self_attn.q_proj.") != std::string::npos;
    const bool k = tensor.name.find("self_attn.k_proj.") != std::string::npos;
    if (!q && !k) return row;
    const int64_t head_dim = tensor.rows() / (q ? heads_ : kv_heads_);
    const int64_t half = head_dim / 2;
    const int64_t inside = row % head_dim;
    return row - inside + (inside < half ? 2 * inside : 2 * (inside - half) + 1);
  }

  Status make_config() {
    nlohmann::ordered_json config;
    config["architectures"] = {architecture_->hf_class};
    config["model_type"] = architecture_->model_type;
    struct Field {
      const char* hf;
      const char* gguf;
      bool needed;
    };
    constexpr Field kFields[] = {
        {"hidden_size", "embedding_length", true},
        {"num_hidden_layers", "block_count", true},
        {"num_attention_heads", "attention.head_count", true},
        {"num_key_value_heads", "attention.head_count_kv", false},
        {"intermediate_size", "feed_forward_length", true},
        {"max_position_embeddings", "context_length", false},
        {"head_dim", "attention.key_length", false},
    };
    for (const Field& field : kFields) {
      const auto value = gguf_.integer(key(field.gguf));
      if (value) config[field.hf] = *value;
      if (!value && field.needed) {
        return error(ErrorCode::kInvalidInput, "{}: metadata '{}' is missing or not a whole number", path_,
                     key(field.gguf));
      }
    }
    config["rms_norm_eps"] = gguf_.number(key("attention.layer_norm_rms_epsilon")).value_or(1e-5);
    config["rope_theta"] = gguf_.number(key("rope.freq_base")).value_or(10000.0);
    if (gguf_.text(key("rope.scaling.type")) == "linear") {
      config["rope_scaling"] = {{"rope_type", "linear"},
                                {"factor", gguf_.number(key("rope.scaling.factor")).value_or(1.0)}};
    }
    config["tie_word_embeddings"] = !has("lm_head.weight");
    config["torch_dtype"] = "float16";
    NFP_ASSIGN_OR_RETURN(const TensorInfo* embedding, need("model.embed_tokens.weight"));
    config["vocab_size"] = embedding->rows();
    if (const auto bos = gguf_.integer("tokenizer.ggml.bos_token_id")) config["bos_token_id"] = *bos;
    if (const auto eos = gguf_.integer("tokenizer.ggml.eos_token_id")) config["eos_token_id"] = *eos;
    heads_ = config["num_attention_heads"].get<int64_t>();
    kv_heads_ = config.value("num_key_value_heads", heads_);
    config_json_ = config.dump(2);
    if (heads_ < 1 || kv_heads_ < 1) {
      return error(ErrorCode::kInvalidInput, "{}: metadata '{}' must be at least 1", path_,
                   key("attention.head_count"));
    }
    return check_heads();
  }

  Status check_heads() const {
    for (const TensorInfo& tensor : tensors()) {
      const bool q = tensor.name.find("self_attn.q_proj.") != std::string::npos;
      const bool k = tensor.name.find("self_attn.k_proj.") != std::string::npos;
      if ((q || k) && (tensor.rows() % (2 * (q ? heads_ : kv_heads_)) != 0)) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} rows, which its {} heads do not divide evenly",
                     path_, tensor.name, tensor.rows(), q ? heads_ : kv_heads_);
      }
    }
    return ok_status();
  }

  MappedFile file_;
  GgufFile gguf_;
  const Architecture* architecture_ = nullptr;
  int64_t heads_ = 1, kv_heads_ = 1;
  std::map<std::string, const GgufTensor*> by_hf_name_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_gguf(const std::string& path) {
  NFP_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  auto source = std::make_unique<GgufSource>(path, std::move(file));
  NFP_RETURN_IF_ERROR(source->open_file());
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
