#include "io/safetensors_set.h"

#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

namespace nfp {

using ShardMap = std::vector<std::pair<std::string, std::vector<std::string>>>;

Result<ShardMap> parse_safetensors_index(std::string_view text, const std::string& name) {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  simdjson::dom::object map;
  const simdjson::padded_string padded(text);
  if (parser.parse(padded).get(root) != simdjson::SUCCESS || root["weight_map"].get(map) != simdjson::SUCCESS) {
    return error(ErrorCode::kInvalidInput, "{}: has no object 'weight_map'; download it again", name);
  }
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [tensor, shard] : map) {
    std::string_view file;
    if (shard.get(file) != simdjson::SUCCESS || file.empty() || file.find('/') != std::string_view::npos ||
        file == "." || file == "..") {
      return error(ErrorCode::kInvalidInput, "{}: weight_map '{}' does not name a file of this directory", name,
                   tensor);
    }
    shards[std::string(file)].insert(std::string(tensor));
  }
  if (shards.empty()) return error(ErrorCode::kInvalidInput, "{}: lists no tensor", name);
  ShardMap out;
  for (auto& [file, tensors] : shards) out.emplace_back(file, std::vector<std::string>(tensors.begin(), tensors.end()));
  return out;
}

Result<SafetensorsSet> SafetensorsSet::open(const std::string& directory, const std::string& single,
                                            const std::string& index) {
  SafetensorsSet set;
  const std::string index_path = directory + "/" + index;
  std::error_code ignored;
  if (std::filesystem::exists(index_path, ignored)) {
    NFP_RETURN_IF_ERROR(set.add_shards(directory, index_path));
  } else {
    NFP_RETURN_IF_ERROR(set.add_file(directory + "/" + single, nullptr));
  }
  return set;
}

Status SafetensorsSet::add_shards(const std::string& directory, const std::string& index_path) {
  NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(index_path));
  NFP_ASSIGN_OR_RETURN(const ShardMap shards, parse_safetensors_index(text, index_path));
  for (const auto& [file, tensors] : shards) NFP_RETURN_IF_ERROR(add_file(directory + "/" + file, &tensors));
  return ok_status();
}

// `expected`: the sorted names of the tensors that the index puts into this file; others in it are left aside.
Status SafetensorsSet::add_file(const std::string& path, const std::vector<std::string>* expected) {
  auto mapped = MappedFile::open(path);
  if (!mapped.ok()) {
    if (mapped.error().code != ErrorCode::kNotFound) return std::move(mapped).error();
    return error(ErrorCode::kNotFound, "{}: is missing; the download of this model is incomplete", path);
  }
  const MappedFile& file = *files_.emplace_back(std::make_unique<MappedFile>(std::move(mapped).value()));
  NFP_ASSIGN_OR_RETURN(SafetensorsHeader header, parse_safetensors(file.bytes(), path));
  size_t found = 0;
  for (SafetensorsEntry& entry : header.tensors) {
    if (expected != nullptr && !std::binary_search(expected->begin(), expected->end(), entry.name)) continue;
    if (!by_name_.emplace(entry.name, tensors_.size()).second) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is in another shard too", path, entry.name);
    }
    ++found;
    tensors_.push_back({std::move(entry.name), entry.dtype, entry.shape, &file,
                        file.bytes().subspan(entry.begin, entry.end - entry.begin)});
  }
  if (expected == nullptr || found == expected->size()) return ok_status();
  for (const std::string& tensor : *expected) {
    const auto place = by_name_.find(tensor);
    if (place == by_name_.end() || tensors_[place->second].file != &file) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing, although the index puts it there", path,
                   tensor);
    }
  }
  return ok_status();
}

const StoredTensor* SafetensorsSet::find(std::string_view name) const {
  const auto place = by_name_.find(std::string(name));
  return place == by_name_.end() ? nullptr : &tensors_[place->second];
}

}  // namespace nfp
