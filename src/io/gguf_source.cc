// A GGUF file, seen as a Hugging Face model.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/mapped_file.h"
#include "io/gguf.h"
#include "io/gguf_rope.h"
#include "io/gguf_tokenizer.h"
#include "io/sources.h"
#include "nested/narrow.h"

namespace nfp {
namespace {

struct Name {
  std::string_view gguf, hf;
};

constexpr Name kOuterNames[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
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

// Llama 3's RoPE scaling as a divisor for each frequency; in the configuration here, so not a tensor of the model.
constexpr std::string_view kRopeFactors = "rope_freqs.weight";

struct Architecture {
  std::string_view gguf;
  std::string_view hf_class, model_type;
  bool permuted_qk;  // the converter reorders the rows of q and k (interleaved rotation)
};
constexpr Architecture kArchitectures[] = {
    {"llama", "LlamaForCausalLM", "llama", true},
    {"qwen2", "Qwen2ForCausalLM", "qwen2", false},
    {"qwen3", "Qwen3ForCausalLM", "qwen3", false},
};

// Of a model split over several files, the others' paths: "x-00001-of-00003.gguf" -> "x-00002-of-00003.gguf", ...
Result<std::vector<std::string>> other_parts(const std::string& path, int64_t count) {
  const std::string suffix = fmt::format("-{:05}-of-{:05}.gguf", 1, count);
  if (!path.ends_with(suffix)) {
    return error(ErrorCode::kInvalidInput, "{}: is one of {} parts; open the first, whose name ends in {}", path, count,
                 suffix);
  }
  std::vector<std::string> parts;
  for (int64_t i = 2; i <= count; ++i) {
    parts.push_back(path.substr(0, path.size() - suffix.size()) + fmt::format("-{:05}-of-{:05}.gguf", i, count));
  }
  return parts;
}

class GgufSource final : public ModelSource {
 public:
  GgufSource(const std::string& path, MappedFile file) : ModelSource(SourceKind::kGguf, path) {
    files_.push_back(std::make_unique<MappedFile>(std::move(file)));
  }

  Status open_file() {
    NFP_ASSIGN_OR_RETURN(gguf_, parse_gguf(files_[0]->bytes(), path_));
    const auto name = gguf_.text("general.architecture");
    if (!name) return error(ErrorCode::kInvalidInput, "{}: metadata 'general.architecture' is missing", path_);
    std::string supported;
    for (const Architecture& known : kArchitectures) {
      if (known.gguf == *name) architecture_ = &known;
      supported += fmt::format("{}{}", supported.empty() ? "" : ", ", known.gguf);
    }
    if (architecture_ == nullptr) {
      return error(ErrorCode::kUnsupported, "{}: architecture '{}' is not supported in GGUF files; supported are {}",
                   path_, *name, supported);
    }
    NFP_RETURN_IF_ERROR(add_tensors(gguf_, *files_[0]));
    NFP_RETURN_IF_ERROR(open_other_parts());
    NFP_RETURN_IF_ERROR(make_config());
    gguf_tokenizer_ = gguf_tokenizer_of(gguf_);
    return ok_status();
  }

  std::optional<std::string> tokenizer_gguf() const override {
    if (!gguf_tokenizer_) return std::nullopt;
    return metadata_only(files_[0]->bytes(), gguf_);
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const Stored& at = stored(tensor);
    const int64_t elements = tensor.row_elements();
    const int64_t blocks = elements / at.type->block;
    const auto row_bytes = static_cast<size_t>(blocks * at.type->bytes);
    const size_t out_bytes = static_cast<size_t>(elements) * size_of(tensor.dtype);
    const bool plain = tensor.dtype != DType::kF16 || at.type->type == GgmlType::kF16;
    std::vector<float> values(plain ? 0 : static_cast<size_t>(elements));
    for (int64_t r = 0; r < count; ++r, out += out_bytes) {
      const auto row = static_cast<size_t>(stored_row(tensor, first + r));
      const std::byte* in = at.bytes.data() + row * row_bytes;
      if (plain) {
        std::memcpy(out, in, row_bytes);
        continue;
      }
      at.type->dequantize(in, blocks, values.data());
      // As llama.cpp requantises to F16: FP32, then round to nearest. A NaN (a damaged scale) becomes infinity.
      narrow_to_fp16(values, reinterpret_cast<uint16_t*>(out));
    }
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { stored(tensor).file->release(stored(tensor).bytes); }

 private:
  struct Stored {
    const GgmlTypeInfo* type = nullptr;
    const MappedFile* file = nullptr;
    std::span<const std::byte> bytes;
  };

  const Stored& stored(const TensorInfo& tensor) const { return stored_[&tensor - tensors().data()]; }

  Status add_tensors(const GgufFile& gguf, const MappedFile& file) {
    for (const GgufTensor& tensor : gguf.tensors) {
      if (tensor.name == kRopeFactors) {
        NFP_RETURN_IF_ERROR(read_rope_factors(tensor, file));
        continue;
      }
      TensorInfo info;
      info.name = hf_name(tensor.name);
      info.dtype = tensor.type->type == GgmlType::kF32    ? DType::kF32
                   : tensor.type->type == GgmlType::kBF16 ? DType::kBF16
                                                          : DType::kF16;
      info.stored = std::string(tensor.type->name);
      info.shape = tensor.shape;
      info.file_bytes = tensor.bytes;
      if (has(info.name)) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' appears twice", file.path(), tensor.name);
      }
      add_tensor(std::move(info));
      stored_.push_back({tensor.type, &file, file.bytes().subspan(tensor.begin, tensor.bytes)});
    }
    return ok_status();
  }

  Status open_other_parts() {
    const int64_t count = gguf_.integer("split.count").value_or(1);
    if (count <= 1) return ok_status();
    if (count > 99999)
      return error(ErrorCode::kInvalidInput, "{}: split.count is {}; the file is damaged", path_, count);
    NFP_ASSIGN_OR_RETURN(const std::vector<std::string> parts, other_parts(path_, count));
    for (const std::string& part : parts) {
      NFP_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(part));
      files_.push_back(std::make_unique<MappedFile>(std::move(file)));
      NFP_ASSIGN_OR_RETURN(const GgufFile gguf, parse_gguf(files_.back()->bytes(), part));
      NFP_RETURN_IF_ERROR(add_tensors(gguf, *files_.back()));
    }
    return ok_status();
  }

  Status read_rope_factors(const GgufTensor& tensor, const MappedFile& file) {
    if (tensor.type->type != GgmlType::kF32 || tensor.shape.rank() != 1 || tensor.shape[0] > 4096) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' must be a vector of F32", file.path(), tensor.name);
    }
    rope_factors_.resize(static_cast<size_t>(tensor.shape[0]));
    std::memcpy(rope_factors_.data(), file.bytes().data() + tensor.begin, tensor.bytes);
    return ok_status();
  }

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
    heads_ = config["num_attention_heads"].get<int64_t>();
    kv_heads_ = config.value("num_key_value_heads", heads_);
    if (heads_ < 1 || kv_heads_ < 1) {
      return error(ErrorCode::kInvalidInput, "{}: metadata '{}' must be at least 1", path_,
                   key("attention.head_count"));
    }
    // llama.cpp's defaults, which are not those of every family's config.json.
    config["num_key_value_heads"] = kv_heads_;
    const int64_t hidden = config["hidden_size"];
    if (!config.contains("head_dim") && hidden % heads_ == 0) config["head_dim"] = hidden / heads_;
    config["rms_norm_eps"] = gguf_.number(key("attention.layer_norm_rms_epsilon")).value_or(1e-5);
    config["rope_theta"] = gguf_.number(key("rope.freq_base")).value_or(10000.0);
    if (!rope_factors_.empty()) {
      const int64_t head_dim = config.value("head_dim", hidden / heads_);
      NFP_ASSIGN_OR_RETURN(const auto scaling,
                           find_llama3_scaling(rope_factors_, head_dim, config["rope_theta"], path_));
      if (scaling) {
        config["rope_scaling"] = {{"rope_type", "llama3"},
                                  {"factor", scaling->factor},
                                  {"low_freq_factor", scaling->low_freq_factor},
                                  {"high_freq_factor", scaling->high_freq_factor},
                                  {"original_max_position_embeddings", scaling->original_context}};
      }
    } else if (gguf_.text(key("rope.scaling.type")) == "linear") {
      config["rope_scaling"] = {{"rope_type", "linear"},
                                {"factor", gguf_.number(key("rope.scaling.factor")).value_or(1.0)}};
    }
    if (gguf_.text(key("rope.scaling.type")) == "yarn") {
      return error(ErrorCode::kUnsupported, "{}: rope scaling 'yarn' is not supported", path_);
    }
    config["attention_bias"] = has("model.layers.0.self_attn.q_proj.bias");
    config["mlp_bias"] = has("model.layers.0.mlp.gate_proj.bias");
    config["tie_word_embeddings"] = !has("lm_head.weight");
    config["torch_dtype"] = "float16";
    NFP_ASSIGN_OR_RETURN(const TensorInfo* embedding, need("model.embed_tokens.weight"));
    config["vocab_size"] = embedding->rows();
    if (const auto bos = gguf_.integer("tokenizer.ggml.bos_token_id")) config["bos_token_id"] = *bos;
    if (const auto eos = gguf_.integer("tokenizer.ggml.eos_token_id")) config["eos_token_id"] = *eos;
    config_json_ = config.dump(2);
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

  std::vector<std::unique_ptr<MappedFile>> files_;  // one, or the parts
  GgufFile gguf_;                                   // the first's
  const Architecture* architecture_ = nullptr;
  int64_t heads_ = 1, kv_heads_ = 1;
  std::vector<Stored> stored_;  // in the order of tensors()
  std::vector<float> rope_factors_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_gguf(const std::string& path) {
  NFP_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  auto source = std::make_unique<GgufSource>(path, std::move(file));
  NFP_RETURN_IF_ERROR(source->open_file());
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
