// One interface over the places a model comes from: a Hugging Face directory (safetensors, sharded or not), a nested
// checkpoint, a GGUF file, and `org/name` in the local Hugging Face cache.
//
// Tensors carry their Hugging Face names and row order whatever the source (a llama GGUF's permuted q/k rows are put
// back). Files are mapped; the pages of a tensor are given back to the kernel once it has been read, so a loaded model
// leaves no second copy resident. All const functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "base/shape.h"
#include "base/thread_pool.h"
#include "nested/matrix_analysis.h"
#include "nested/matrix_reader.h"

namespace nfp {

enum class SourceKind : uint8_t { kHuggingFace, kNested, kGguf };

struct TensorInfo {
  std::string name;  // "model.layers.0.self_attn.q_proj.weight"
  // As read: the source's own for plain types, F16 for quantised GGUF types and for FP8, the original one for nested.
  DType dtype;
  std::string stored;        // as the file spells it: "BF16", "Q4_1", "nested"
  Shape shape;               // outermost first
  uint64_t file_bytes = 0;   // in the source's files
  std::string part_of = {};  // the tensor whose rows these are, where it is read in parts (io/split_source.h)

  // A tensor is read by slices of its outermost dimension; a scalar is one row of one element.
  int64_t rows() const { return shape.rank() == 0 ? 1 : shape[0]; }
  int64_t row_elements() const {
    int64_t count = 1;
    for (size_t i = 1; i < shape.rank(); ++i) count *= shape[i];
    return count;
  }
  uint64_t bytes() const { return static_cast<uint64_t>(shape.elements()) * size_of(dtype); }
};

// The tokenizer that a GGUF file carries, uninterpreted (keys tokenizer.*). Views live as long as the ModelSource.
struct GgufTokenizer {
  std::string_view architecture;  // general.architecture
  std::string_view model;         // tokenizer.ggml.model: "gpt2" (byte-level BPE), "llama" (SentencePiece), ...
  std::string_view pre;  // tokenizer.ggml.pre: names the pre-tokenizer ("smollm", "llama-bpe", "qwen2"); may be empty
  std::vector<std::string_view> tokens;
  std::vector<int32_t>
      types;  // as many as tokens, or none: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
  std::vector<float> scores;             // as many as tokens, or none
  std::vector<std::string_view> merges;  // "left right"
  std::optional<int64_t> bos, eos, eot, eom, unknown, padding;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  std::string_view chat_template;  // may be empty
};

// Linear layers that the files hold in FP8 (docs/models.md, "Sources"): there is no original to restore.
struct StoredFp8 {
  std::string text;      // how, for people
  bool by_rows = false;  // some have a scale a row (or a matrix), so that FP8 is the very codes
};

class ModelSource {
 public:
  // `model`: a directory, a .gguf file, or org/name. Errors name the file and, where a model is not in the cache, the
  // command that downloads it.
  static Result<std::unique_ptr<ModelSource>> open(const std::string& model);
  virtual ~ModelSource() = default;
  ModelSource(const ModelSource&) = delete;
  ModelSource& operator=(const ModelSource&) = delete;

  SourceKind kind() const { return kind_; }
  const std::string& path() const { return path_; }  // the directory or GGUF file in use (a snapshot, for org/name)

  // Hugging Face config.json; for GGUF written from its metadata, with the same fields.
  const std::string& config_json() const { return config_json_; }
  // The small file `name` beside the weights ("tokenizer.json", "tokenizer_config.json", "generation_config.json",
  // "chat_template.jinja"): its text, nothing where it is absent, an error where it cannot be read. A GGUF file has
  // only the generation_config.json that its general.sampling.* keys make, or X.generation_config.json beside X.gguf,
  // which goes before them.
  Result<std::optional<std::string>> text_file(const std::string& name) const;
  // Of a GGUF file, or of a nested checkpoint made from one; nullptr otherwise.
  const GgufTokenizer* gguf_tokenizer() const { return gguf_tokenizer_ ? &*gguf_tokenizer_ : nullptr; }

  const std::optional<StoredFp8>& stored_fp8() const { return stored_fp8_; }

  // What tokenizer.gguf must hold to carry a GGUF file's tokenizer on; nothing for other kinds.
  virtual std::optional<std::string> tokenizer_gguf() const { return std::nullopt; }

  std::span<const TensorInfo> tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // nullptr when absent
  bool has(std::string_view name) const { return find(name) != nullptr; }
  uint64_t file_bytes() const;  // of all tensors

  // A weight matrix [n, k] for a backend. Nested where every row fits (docs/format.md), else dense FP16; finding out
  // reads the matrix once, on all threads. The reader must not outlive this object. Errors: absent, not 2-D,
  // not a float type, NaN or infinity inside. `analysis`, when given, receives what was found.
  virtual Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& threads,
                                                       MatrixAnalysis* analysis = nullptr) const;
  // The same matrix before nesting: rows of FP16 or BF16 bits.
  Result<MatrixSource> matrix_source(std::string_view name) const;

  // The whole tensor as FP32. `out` has exactly its elements.
  Status read_f32(std::string_view name, std::span<float> out) const;
  // Rows first .. first+count-1 as FP16 bits, BF16 and FP32 rounded to nearest. out: [count, row_elements].
  Status read_fp16_rows(std::string_view name, int64_t first, int64_t count, uint16_t* out) const;
  // The same in the tensor's own dtype. out: [count, row_elements] of tensor.dtype.
  virtual Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const = 0;
  // Gives the tensor's pages back; reading it again is allowed and reads the file again.
  virtual void release(const TensorInfo& tensor) const = 0;

 protected:
  ModelSource(SourceKind kind, std::string path) : kind_(kind), path_(std::move(path)) {}
  void add_tensor(TensorInfo tensor);
  // All that a source says of its model beside the tensors, for one that shows another's in another way.
  void describe_as(const ModelSource& other);
  Result<const TensorInfo*> need(std::string_view name) const;

  const SourceKind kind_;
  const std::string path_;
  std::string config_json_;
  std::string generation_json_;  // of a GGUF file with general.sampling.*; else empty
  std::optional<GgufTokenizer> gguf_tokenizer_;
  std::optional<StoredFp8> stored_fp8_;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t, Hash, std::equal_to<>> by_name_;
};

}  // namespace nfp
