#include "io/shard_set.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "io/hub_cache.h"
#include "io/model_json.h"
#include "io/tensor_name.h"

namespace nfp {
namespace {

// The error where there are no weights, or what lies in their place.
Error other_weights(const std::string& directory, Error missing) {
  std::error_code code;
  for (const char* name :
       {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "adapter_model.safetensors"}) {
    if (missing.code != ErrorCode::kNotFound || !std::filesystem::exists(directory + "/" + name, code)) continue;
    return error(ErrorCode::kUnsupported,
                 "{}: has its weights in {}, which is not read; save the whole model with transformers, which writes "
                 "model.safetensors",
                 directory, name);
  }
  return missing;
}

// Whether the folder of a file in `directory` is reached over a link that leaves it. The file itself may be one: those
// of the Hugging Face cache are, to blobs elsewhere in it.
bool leads_outside(const std::string& directory, const std::string& file) {
  namespace fs = std::filesystem;
  if (file.find('/') == std::string::npos) return false;
  std::error_code code;
  const fs::path top = fs::weakly_canonical(directory, code);
  const fs::path folder = fs::weakly_canonical(fs::path(directory) / fs::path(file).parent_path(), code);
  return code || std::mismatch(top.begin(), top.end(), folder.begin(), folder.end()).first != top.end();
}

}  // namespace

Result<ShardSet> ShardSet::open(const std::string& directory, const std::string& prefix) {
  ShardSet set;
  const std::string index_path = directory + "/" + prefix + ".safetensors.index.json";
  std::error_code code;
  const std::string single = directory + "/" + prefix + ".safetensors";
  if (std::filesystem::exists(single, code) || !std::filesystem::exists(index_path, code)) {
    if (Status added = set.add(single, nullptr); !added.ok()) return other_weights(directory, std::move(added).error());
    return set;
  }
  NFP_ASSIGN_OR_RETURN(const std::string text, read_model_text(index_path));
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  simdjson::dom::object map;
  if (parser.parse(text).get(root) != simdjson::SUCCESS || root["weight_map"].get(map) != simdjson::SUCCESS) {
    return error(ErrorCode::kInvalidInput, "{}: has no object 'weight_map'; download it again", index_path);
  }
  const auto not_here = [&](std::string_view tensor) {
    return error(ErrorCode::kInvalidInput, "{}: weight_map '{}' does not name a file of this directory", index_path,
                 tensor);
  };
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [tensor, shard] : map) {
    if (!is_tensor_name(tensor)) {
      return error(ErrorCode::kInvalidInput, "{}: a name in weight_map is no printable text; download it again",
                   index_path);
    }
    std::string_view file;
    if (shard.get(file) != simdjson::SUCCESS || !is_plain_relative_path(file)) return not_here(tensor);
    shards[std::string(file)].insert(std::string(tensor));
  }
  if (shards.empty()) return error(ErrorCode::kInvalidInput, "{}: lists no tensor", index_path);
  for (const auto& [file, tensors] : shards) {
    if (leads_outside(directory, file)) return not_here(*tensors.begin());
    NFP_RETURN_IF_ERROR(set.add(fmt::format("{}/{}", directory, file), &tensors));
  }
  return set;
}

Status ShardSet::add(const std::string& path, const std::set<std::string>* expected) {
  auto mapped = MappedFile::open(path);
  if (!mapped.ok()) {
    if (mapped.error().code != ErrorCode::kNotFound) return std::move(mapped).error();
    return error(ErrorCode::kNotFound, "{}: is missing; the model is incomplete, download or convert it again", path);
  }
  Shard& shard = *shards_.emplace_back(std::make_unique<Shard>());
  shard.file = std::move(mapped).value();
  NFP_ASSIGN_OR_RETURN(SafetensorsHeader header, parse_safetensors(shard.file.bytes(), path));
  shard.tensors = std::move(header.tensors);
  for (const SafetensorsEntry& entry : shard.tensors) {
    if (expected != nullptr && !expected->contains(entry.name)) continue;
    if (!by_name_.emplace(entry.name, std::pair(&shard, &entry)).second) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is in another shard too", path, entry.name);
    }
  }
  if (expected == nullptr) return ok_status();
  for (const std::string& tensor : *expected) {
    const auto place = by_name_.find(tensor);
    if (place == by_name_.end() || place->second.first != &shard) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing, although the index puts it there", path,
                   tensor);
    }
  }
  return ok_status();
}

std::vector<const SafetensorsEntry*> ShardSet::entries() const {
  std::vector<const SafetensorsEntry*> all;
  for (const auto& shard : shards_) {
    for (const SafetensorsEntry& entry : shard->tensors) {
      if (find(entry.name) == &entry) all.push_back(&entry);
    }
  }
  return all;
}

const SafetensorsEntry* ShardSet::find(std::string_view name) const {
  const auto place = by_name_.find(name);
  return place == by_name_.end() ? nullptr : place->second.second;
}

const ShardSet::Shard& ShardSet::shard_of(const SafetensorsEntry& entry) const {
  return *by_name_.find(entry.name)->second.first;
}

std::span<const std::byte> ShardSet::bytes(const SafetensorsEntry& entry) const {
  return shard_of(entry).file.bytes().subspan(entry.begin, entry.end - entry.begin);
}

void ShardSet::release(const SafetensorsEntry& entry) const { shard_of(entry).file.release(bytes(entry)); }

}  // namespace nfp
