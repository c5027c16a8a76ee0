// The safetensors files of one directory: a single file, or shards that an index lists. All are mapped and checked.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mapped_file.h"
#include "base/result.h"
#include "io/safetensors.h"

namespace nfp {

struct StoredTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  const MappedFile* file = nullptr;
  std::span<const std::byte> bytes;
};

class SafetensorsSet {
 public:
  // `index` in `directory` where it is there, else the file `single`. Errors: a shard or tensor that the index lists is
  // missing, a tensor in two shards, and all of parse_safetensors.
  static Result<SafetensorsSet> open(const std::string& directory, const std::string& single, const std::string& index);

  std::span<const StoredTensor> tensors() const { return tensors_; }  // by file, then by offset
  const StoredTensor* find(std::string_view name) const;              // nullptr when absent
  std::span<const std::unique_ptr<MappedFile>> files() const { return files_; }

 private:
  Status add_file(const std::string& path, const std::vector<std::string>* expected);
  Status add_shards(const std::string& directory, const std::string& index_path);

  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
};

// weight_map of an index: shard file -> its tensors, both sorted. `name` is for messages.
Result<std::vector<std::pair<std::string, std::vector<std::string>>>> parse_safetensors_index(std::string_view text,
                                                                                              const std::string& name);

}  // namespace nfp
