// A GGUF file, seen as a Hugging Face model.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/mapped_file.h"
#include "io/family.h"
#include "io/gguf.h"
#include "io/gguf_families.h"
#include "io/gguf_parts.h"
#include "io/gguf_rope.h"
#include "io/gguf_tokenizer.h"
#include "io/sources.h"
#include "nested/narrow.h"

namespace nfp {
namespace {

// Scalings of rotation as a divisor for each frequency: Llama 3's, and LongRoPE's two. In the configuration here, so
// not tensors of the model.
constexpr std::string_view kRopeFactors = "rope_freqs.weight", kLongFactors = "rope_factors_long.weight",
                           kShortFactors = "rope_factors_short.weight";

// As of layers, configurations with more are refused.
constexpr int64_t kMostExperts = 4096, kMostHeads = 4096;

// Of a model split over several files, the others' paths: "x-00001-of-00003.gguf" -> "x-00002-of-00003.gguf", ...
Result<std::vector<std::string>> other_parts(const std::string& path, int64_t count) {
  const auto first = parse_gguf_part(path);
  if (!first || first->number != 1 || first->count != count) {
    return error(ErrorCode::kInvalidInput, "{}: is one of {} parts; open the first, whose name ends in {}", path, count,
                 gguf_part_path("", 1, count));
  }
  std::vector<std::string> parts;
  for (int64_t i = 2; i <= count; ++i) parts.push_back(gguf_part_path(first->prefix, i, count));
  return parts;
}

class GgufSource final : public ModelSource {
 public:
  GgufSource(const std::string& path, MappedFile file) : ModelSource(SourceKind::kGguf, path) {
    files_.push_back(std::make_unique<MappedFile>(std::move(file)));
  }

  Status open_file() {
    NFP_ASSIGN_OR_RETURN(gguf_, parse_gguf(files_[0]->bytes(), path_));
    // First, as later parts name no architecture.
    NFP_ASSIGN_OR_RETURN(const std::vector<std::string> others, later_parts());
    NFP_ASSIGN_OR_RETURN(family_, family_of_gguf(gguf_, path_));
    NFP_RETURN_IF_ERROR(check_kinds(*family_, gguf_, path_));
    NFP_RETURN_IF_ERROR(add_tensors(gguf_, *files_[0]));
    NFP_RETURN_IF_ERROR(add_parts(others));
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
    const int64_t permuted = permuted_head_rows(tensor);
    const size_t out_bytes = static_cast<size_t>(elements) * size_of(tensor.dtype);
    const bool plain = tensor.dtype != DType::kF16 || at.type->type == GgmlType::kF16;
    std::vector<float> values(plain ? 0 : static_cast<size_t>(elements));
    for (int64_t r = 0; r < count; ++r, out += out_bytes) {
      const auto row = static_cast<size_t>(stored_row(permuted, first + r));
      const std::byte* in = at.bytes.data() + row * row_bytes;
      if (plain) {
        std::memcpy(out, in, row_bytes);
        if (family_->norm_offset != 0 && is_norm(tensor)) take_offset(out, elements);
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
      if (auto* factors = factors_of(tensor.name)) {
        NFP_RETURN_IF_ERROR(read_rope_factors(tensor, file, *factors));
        continue;
      }
      const std::string name = hf_name(*family_, tensor.name);
      const std::span<const std::byte> bytes = file.bytes().subspan(tensor.begin, tensor.bytes);
      const size_t mark = name.find('#');
      if (mark == std::string::npos) {
        NFP_RETURN_IF_ERROR(add(tensor, name, tensor.shape, {tensor.type, &file, bytes}));
        continue;
      }
      // The matrices of all experts, one behind the other.
      if (tensor.shape.rank() != 3 || tensor.shape[0] < 1 || tensor.shape[0] > kMostExperts) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' must have three dimensions, the last of 1 to {}",
                     file.path(), tensor.name, kMostExperts);
      }
      const int64_t experts = tensor.shape[0];
      const size_t each = bytes.size() / static_cast<size_t>(experts);
      for (int64_t e = 0; e < experts; ++e) {
        std::string numbered = name;
        numbered.replace(mark, 1, std::to_string(e));
        NFP_RETURN_IF_ERROR(add(tensor, numbered, {tensor.shape[1], tensor.shape[2]},
                                {tensor.type, &file, bytes.subspan(static_cast<size_t>(e) * each, each)}));
      }
    }
    return ok_status();
  }

  Status add(const GgufTensor& tensor, const std::string& name, const Shape& shape, const Stored& place) {
    TensorInfo info;
    info.name = name;
    info.dtype = tensor.type->type == GgmlType::kF32    ? DType::kF32
                 : tensor.type->type == GgmlType::kBF16 ? DType::kBF16
                                                        : DType::kF16;
    info.stored = std::string(tensor.type->name);
    info.shape = shape;
    info.file_bytes = place.bytes.size();
    if (has(info.name)) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' appears twice", place.file->path(), tensor.name);
    }
    add_tensor(std::move(info));
    stored_.push_back(place);
    return ok_status();
  }

  std::vector<float>* factors_of(std::string_view tensor) {
    if (tensor == kRopeFactors) return &rope_factors_;
    if (tensor == kLongFactors) return &long_factors_;
    return tensor == kShortFactors ? &short_factors_ : nullptr;
  }

  Result<std::vector<std::string>> later_parts() const {
    NFP_ASSIGN_OR_RETURN(const std::optional<int64_t> stated, gguf_.whole_number("split.count", path_));
    const int64_t count = stated.value_or(1);
    if (count <= 1) return std::vector<std::string>();
    if (count > kMostGgufParts)
      return error(ErrorCode::kInvalidInput, "{}: split.count is {}; the file is damaged", path_, count);
    return other_parts(path_, count);
  }

  Status add_parts(const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      NFP_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(part));
      files_.push_back(std::make_unique<MappedFile>(std::move(file)));
      NFP_ASSIGN_OR_RETURN(const GgufFile gguf, parse_gguf(files_.back()->bytes(), part));
      NFP_RETURN_IF_ERROR(add_tensors(gguf, *files_.back()));
    }
    return ok_status();
  }

  static Status read_rope_factors(const GgufTensor& tensor, const MappedFile& file, std::vector<float>& factors) {
    if (tensor.type->type != GgmlType::kF32 || tensor.shape.rank() != 1 || tensor.shape[0] > 4096) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' must be a vector of F32", file.path(), tensor.name);
    }
    factors.resize(static_cast<size_t>(tensor.shape[0]));
    std::memcpy(factors.data(), file.bytes().data() + tensor.begin, tensor.bytes);
    return ok_status();
  }

  std::string key(std::string_view suffix) const { return fmt::format("{}.{}", family_->gguf, suffix); }

  // Heads of a tensor of queries or keys; 0 for other tensors.
  int64_t heads_of(const TensorInfo& tensor) const {
    const auto role = role_of(*family_, tensor.name);
    return role == TensorRole::kQuery ? heads_ : role == TensorRole::kKey ? kv_heads_ : 0;
  }
  // Rows of each head of a tensor whose rows are permuted; 0 for other tensors.
  int64_t permuted_head_rows(const TensorInfo& tensor) const {
    const int64_t heads = family_->gguf_permutes_qk ? heads_of(tensor) : 0;
    return heads == 0 ? 0 : tensor.rows() / heads;
  }
  // llama.cpp's converter adds the offset to the weights of norms, which it keeps as vectors of F32.
  static bool is_norm(const TensorInfo& tensor) {  // biases are vectors of FP32 too
    return tensor.shape.rank() == 1 && tensor.dtype == DType::kF32 && tensor.name.ends_with("norm.weight");
  }
  void take_offset(std::byte* row, int64_t elements) const {
    for (int64_t i = 0; i < elements; ++i, row += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, row, sizeof(value));
      value -= family_->norm_offset;
      std::memcpy(row, &value, sizeof(value));
    }
  }
  // The row of the file that holds row `row` of the Hugging Face matrix. llama.cpp's converter stores each head's rows
  // so that rotation pairs neighbours: file row 2i + h of a head is row i + h * head_dim / 2.
  static int64_t stored_row(int64_t head_rows, int64_t row) {
    if (head_rows == 0) return row;
    const int64_t half = head_rows / 2;
    const int64_t inside = row % head_rows;
    return row - inside + (inside < half ? 2 * inside : 2 * (inside - half) + 1);
  }

  GgufFacts facts(int64_t layers) const {
    GgufFacts facts{*family_, gguf_, path_, long_factors_, short_factors_, {}};
    for (int64_t i = 0; i < layers && family_->has(TensorRole::kRouter); ++i) {
      const auto layer = static_cast<int32_t>(i);
      if (!has(family_->name(TensorRole::kRouter, layer) + ".weight")) facts.dense_layers.push_back(layer);
    }
    return facts;
  }
  // Whether the first layer's matrices of this kind have biases.
  bool has_bias(GemmType type) const {
    const std::vector<std::string> names = family_->names(type, 0);
    return !names.empty() && has(names.front() + ".bias");
  }

  Status make_config() {
    nlohmann::ordered_json config;
    config["architectures"] = {family_->architecture};
    config["model_type"] = family_->model_type;
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
    for (const auto& [name, heads] :
         {std::pair("attention.head_count", heads_), std::pair("attention.head_count_kv", kv_heads_)}) {
      if (heads >= 1 && heads <= kMostHeads) continue;
      return error(ErrorCode::kInvalidInput, "{}: metadata '{}' is {}; it must be 1 to {}", path_, key(name), heads,
                   kMostHeads);
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
    }
    const GgufFacts known = facts(std::min(config["num_hidden_layers"].get<int64_t>(), kMostLayers));
    NFP_RETURN_IF_ERROR(check_metadata(known, config));
    if (rope_factors_.empty() && known.long_factors.empty()) {
      NFP_RETURN_IF_ERROR(add_rope_scaling(known, config));
    } else {
      NFP_RETURN_IF_ERROR(refuse_rope_scaling(known));
    }
    add_family_fields(known, config);
    config["attention_bias"] = config["qkv_bias"] = config["use_bias"] = has_bias(GemmType::kQkv);
    config["attention_out_bias"] = has_bias(GemmType::kOutput);
    config["mlp_bias"] = has_bias(GemmType::kGateUp);
    config["tie_word_embeddings"] = !has("lm_head.weight");
    config["torch_dtype"] = "float16";
    NFP_ASSIGN_OR_RETURN(const TensorInfo* embedding, need("model.embed_tokens.weight"));
    config["vocab_size"] = embedding->rows();
    if (const auto bos = gguf_.integer("tokenizer.ggml.bos_token_id")) config["bos_token_id"] = *bos;
    if (const auto eos = gguf_.integer("tokenizer.ggml.eos_token_id")) config["eos_token_id"] = *eos;
    config_json_ = config.dump(2);
    make_generation_config();
    return check_heads();
  }

  // general.sampling.*, as llama.cpp names what generation_config.json says (its other keys have no counterpart there).
  void make_generation_config() {
    nlohmann::ordered_json generation;
    for (const auto& [hf, gguf] : {std::pair("temperature", "temp"), std::pair("top_p", "top_p"),
                                   std::pair("min_p", "min_p"), std::pair("repetition_penalty", "penalty_repeat")}) {
      if (const auto value = gguf_.number(fmt::format("general.sampling.{}", gguf))) generation[hf] = *value;
    }
    if (const auto value = gguf_.integer("general.sampling.top_k")) generation["top_k"] = *value;
    if (!generation.is_null()) generation_json_ = generation.dump(2);
  }

  Status check_heads() const {
    for (const TensorInfo& tensor : tensors()) {
      const int64_t heads = heads_of(tensor);
      if (heads > 0 && tensor.rows() % (2 * heads) != 0) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} rows, which its {} heads do not divide evenly",
                     path_, tensor.name, tensor.rows(), heads);
      }
    }
    return ok_status();
  }

  std::vector<std::unique_ptr<MappedFile>> files_;  // one, or the parts
  GgufFile gguf_;                                   // the first's
  const Family* family_ = nullptr;
  int64_t heads_ = 1, kv_heads_ = 1;
  std::vector<Stored> stored_;  // in the order of tensors()
  std::vector<float> rope_factors_, long_factors_, short_factors_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> open_gguf(const std::string& path) {
  NFP_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  auto source = std::make_unique<GgufSource>(path, std::move(file));
  NFP_RETURN_IF_ERROR(source->open_file());
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
