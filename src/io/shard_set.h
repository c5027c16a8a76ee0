// The safetensors files of a model, sharded or not, as one set of tensors.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "base/result.h"
#include "io/safetensors.h"

namespace nfp {

class ShardSet {
 public:
  // Opens DIRECTORY/PREFIX.safetensors or, without it, DIRECTORY/PREFIX.safetensors.index.json with its shards. Where
  // both are there transformers reads the former too: it leaves the index of a model that it writes another over.
  // Errors: a shard or tensor that the index names is missing, a tensor in two shards, and whatever parse_safetensors
  // finds.
  static Result<ShardSet> open(const std::string& directory, const std::string& prefix);

  std::vector<const SafetensorsEntry*> entries() const;  // by file and offset
  const SafetensorsEntry* find(std::string_view name) const;
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  void release(const SafetensorsEntry& entry) const;  // gives its pages back

 private:
  struct Shard {
    MappedFile file;
    std::vector<SafetensorsEntry> tensors;
  };
  Status add(const std::string& path, const std::set<std::string>* expected);
  const Shard& shard_of(const SafetensorsEntry& entry) const;

  std::vector<std::unique_ptr<Shard>> shards_;
  std::map<std::string, std::pair<const Shard*, const SafetensorsEntry*>, std::less<>> by_name_;
};

}  // namespace nfp
