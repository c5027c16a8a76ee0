#include "hub/file_choice.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/byte_size.h"
#include "base/json_depth.h"
#include "io/gguf_parts.h"
#include "io/gguf_tokenizer.h"
#include "io/model_json.h"
#include "io/nested_checkpoint.h"

namespace nfp {
namespace {

constexpr std::array<std::string_view, 8> kDescriptive = {
    "config.json",         "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json",     kTokenizerGguf,   "model.safetensors.index.json"};

const HubFile* find(const HubModel& model, std::string_view path) {
  const auto place =
      std::find_if(model.files.begin(), model.files.end(), [&](const HubFile& file) { return file.path == path; });
  return place == model.files.end() ? nullptr : &*place;
}

bool has_safetensors(const HubModel& model) {
  return find(model, "model.safetensors") != nullptr || find(model, "model.safetensors.index.json") != nullptr;
}

// PREFIX.safetensors, or without it the files that PREFIX.safetensors.index.json names: what ShardSet opens. `prefix`:
// with the folder.
Status add_safetensors(const HubModel& model, const HubName& name, const ReadFile& read, const std::string& prefix,
                       std::vector<HubFile>& out) {
  std::set<std::string> paths;
  const std::string index = prefix + ".safetensors.index.json";
  if (find(model, prefix + ".safetensors") == nullptr && find(model, index) != nullptr) {
    NFP_ASSIGN_OR_RETURN(const std::string text, read(index));
    const auto root = parse_file_json<nlohmann::json>(text);
    const auto map = root.is_object() ? root.find("weight_map") : root.end();
    if (map == root.end() || !map->is_object() || map->empty()) {
      return error(ErrorCode::kInvalidInput, "{}: {} has no object 'weight_map'", name.text(), index);
    }
    const size_t slash = prefix.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : prefix.substr(0, slash + 1);
    for (const auto& shard : *map) {
      if (!shard.is_string()) return error(ErrorCode::kInvalidInput, "{}: {}: a shard has no name", name.text(), index);
      paths.insert(folder + shard.get<std::string>());
    }
  } else {
    paths.insert(prefix + ".safetensors");
  }
  std::map<std::string_view, const HubFile*> by_path;
  for (const HubFile& file : model.files) by_path.emplace(file.path, &file);
  for (const std::string& path : paths) {
    const auto file = by_path.find(path);
    if (file == by_path.end())
      return error(ErrorCode::kNotFound, "{}: has no {}, which its index names", name.text(), path);
    out.push_back(*file->second);
  }
  return ok_status();
}

Result<std::vector<HubFile>> gguf_files(const HubModel& model, const HubName& name) {
  std::vector<HubFile> all, out;
  for (const HubFile& file : model.files) {
    if (names_gguf_model(file.path)) all.push_back(file);
  }
  std::string list;
  for (const HubFile& file : all) {
    list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", file.path, human_bytes(file.size));
  }
  const HubFile* chosen = name.file.empty() && all.size() == 1 ? all.data() : find(model, name.file);
  if (chosen == nullptr && name.file.empty()) {
    return error(ErrorCode::kUsage, "{}: holds {} GGUF files; choose one with --file: {}", name.text(), all.size(),
                 list);
  }
  if (chosen == nullptr) {
    return error(ErrorCode::kUsage, "{}: has no file {}; {}", name.repository, name.file,
                 all.empty() ? "it has no GGUF file at all" : "its GGUF files are " + list);
  }
  if (!chosen->path.ends_with(".gguf")) {
    return error(ErrorCode::kUsage, "{}: --file chooses a GGUF file; without it the whole model is taken",
                 chosen->path);
  }
  const auto part = parse_gguf_part(chosen->path);
  if (!part) return std::vector<HubFile>{*chosen};
  std::map<std::string_view, const HubFile*> by_path;
  for (const HubFile& file : model.files) by_path.emplace(file.path, &file);
  for (int64_t i = 1; i <= part->count; ++i) {
    const std::string path = gguf_part_path(part->prefix, i, part->count);
    const auto file = by_path.find(path);
    if (file == by_path.end()) {
      return error(ErrorCode::kNotFound, "{}: has no {}, one of the {} parts of that model", name.repository, path,
                   part->count);
    }
    out.push_back(*file->second);
  }
  return out;
}

}  // namespace

std::vector<HubFile> descriptive_files(const HubModel& model, const std::string& file) {
  std::vector<HubFile> out;
  if (!file.empty() || !has_safetensors(model)) return out;
  for (const HubFile& candidate : model.files) {
    // Of a nested checkpoint the lower bytes have an index of their own, in a folder.
    if (std::find(kDescriptive.begin(), kDescriptive.end(), candidate.path) != kDescriptive.end() ||
        candidate.path.ends_with("/lower.safetensors.index.json")) {
      out.push_back(candidate);
    }
  }
  return out;
}

Result<std::vector<HubFile>> weight_files(const HubModel& model, const HubName& name, const ReadFile& read) {
  const bool safetensors = has_safetensors(model);
  const auto any = [&](std::string_view end) {
    return std::any_of(model.files.begin(), model.files.end(),
                       [&](const HubFile& file) { return file.path.ends_with(end); });
  };
  if (!name.file.empty() || (!safetensors && any(".gguf"))) return gguf_files(model, name);
  if (!safetensors || find(model, "config.json") == nullptr) {
    return error(ErrorCode::kUnsupported, "{}: holds no model that can be served: it has no {}{}", name.text(),
                 safetensors ? "config.json" : "safetensors or GGUF file",
                 any(".bin") || any(".pt") || any(".pth") ? " (PyTorch's pickled files are not read)" : "");
  }
  std::vector<HubFile> out;
  NFP_RETURN_IF_ERROR(add_safetensors(model, name, read, "model", out));
  NFP_ASSIGN_OR_RETURN(const std::string config, read("config.json"));
  const auto root = parse_model_json<nlohmann::json>(config, name.text() + ": config.json");
  if (root.ok() && root->contains("nestedfp")) {
    NFP_ASSIGN_OR_RETURN(const NestedInfo info, parse_nested_info(config, name.text() + ": config.json"));
    NFP_RETURN_IF_ERROR(add_safetensors(model, name, read, info.lower_directory + "/lower", out));
  }
  return out;
}

}  // namespace nfp
