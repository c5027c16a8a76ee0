#include "hub/cache_list.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include "base/mapped_file.h"
#include "io/gguf_parts.h"
#include "io/gguf_tokenizer.h"
#include "io/hub_cache.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "models--";

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code code;
  for (fs::directory_iterator place(folder, code), end; !code && place != end; place.increment(code)) {
    out.push_back(place->path());
  }
  std::sort(out.begin(), out.end());
  return out;
}

// Files below `folder`, by their paths relative to it; links count as what they lead to.
std::vector<std::string> files_below(const fs::path& folder) {
  std::vector<std::string> out;
  std::error_code code, ignored;
  for (fs::recursive_directory_iterator place(folder, code), end; !code && place != end; place.increment(code)) {
    if (place->is_regular_file(ignored)) out.push_back(place->path().lexically_relative(folder).string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

uint64_t size_of_file(const fs::path& path) {
  std::error_code code;
  const auto size = fs::file_size(path, code);
  return code ? 0 : static_cast<uint64_t>(size);
}

// "models--org--name" -> "org/name"; nothing for names without an organisation, which MODEL does not take.
std::optional<std::string> repository_of(const std::string& folder) {
  if (!folder.starts_with(kPrefix)) return std::nullopt;
  const std::string rest = folder.substr(kPrefix.size());
  const size_t dashes = rest.find("--");
  if (dashes == std::string::npos) return std::nullopt;
  const std::string name = rest.substr(0, dashes) + "/" + rest.substr(dashes + 2);
  return parse_hub_name(name) ? std::optional<std::string>(name) : std::nullopt;
}

struct GgufFiles {
  std::string first;
  uint64_t bytes = 0;
};

// GGUF models among the files, parts of one counted together.
std::vector<GgufFiles> gguf_models(const fs::path& snapshot, const std::vector<std::string>& files) {
  std::vector<GgufFiles> out;
  for (const std::string& file : files) {
    const auto part = parse_gguf_part(file);
    if (names_gguf_model(file)) {
      out.push_back({file, size_of_file(snapshot / file)});
    } else if (part && !out.empty() && out.back().first == gguf_part_path(part->prefix, 1, part->count)) {
      out.back().bytes += size_of_file(snapshot / file);
    }
  }
  return out;
}

bool has_weights(const fs::path& snapshot) {
  const std::vector<std::string> files = files_below(snapshot);
  return std::any_of(files.begin(), files.end(), [](const std::string& file) {
    return file.ends_with(".safetensors") || (file.ends_with(".gguf") && fs::path(file).filename() != kTokenizerGguf);
  });
}

void add_models(const HubName& name, const fs::path& snapshot, std::vector<CachedModel>& out) {
  const std::vector<std::string> files = files_below(snapshot);
  const std::vector<GgufFiles> gguf = gguf_models(snapshot, files);
  const auto has = [&](const char* file) { return std::find(files.begin(), files.end(), file) != files.end(); };
  const bool safetensors = has("model.safetensors") || has("model.safetensors.index.json");
  if (safetensors || (gguf.empty() && has("config.json"))) {
    CachedModel model{name.text(), snapshot, 0};
    for (const std::string& file : files) {
      if (!file.ends_with(".gguf")) model.bytes += size_of_file(snapshot / file);
    }
    out.push_back(std::move(model));
  }
  for (const GgufFiles& model : gguf) {
    HubName full = name;
    // Alone at the top it is what the repository's name means.
    const bool alone = gguf.size() == 1 && !safetensors && model.first.find('/') == std::string::npos;
    if (!alone) full.file = model.first;
    out.push_back({full.text(), snapshot / model.first, model.bytes});
  }
}

}  // namespace

CacheList list_hub_cache(const std::string& cache) {
  CacheList list;
  for (const fs::path& folder : entries(cache)) {
    const auto repository = repository_of(folder.filename().string());
    if (!repository) continue;
    std::set<std::string> named;
    for (const std::string& revision : files_below(folder / "refs")) {
      HubName name{*repository, revision, ""};
      const auto found = find_in_hub_cache_at(cache, name);
      if (!found.ok()) continue;
      add_models(name, *found, list.models);
      named.insert(*found);
    }
    // Pulled by its commit, or left behind by its branch. One without weights is a download that did not end.
    for (const fs::path& snapshot : entries(folder / "snapshots")) {
      const HubName name{*repository, snapshot.filename(), ""};
      const auto found = find_in_hub_cache_at(cache, name);
      if (found.ok() && !named.contains(*found) && has_weights(*found)) add_models(name, *found, list.models);
    }
    uint64_t unfinished = 0;
    for (const fs::path& blob : entries(folder / "blobs")) {
      if (blob.extension() == ".incomplete") unfinished += size_of_file(blob);
    }
    if (unfinished > 0) list.unfinished.push_back({*repository, unfinished});
  }
  std::sort(list.models.begin(), list.models.end(),
            [](const CachedModel& a, const CachedModel& b) { return a.name < b.name; });
  return list;
}

}  // namespace nfp
