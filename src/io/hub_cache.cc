#include "io/hub_cache.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "base/mapped_file.h"
#include "base/user_folders.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

// What the hub allows in the name of an organisation or a model.
bool is_name(std::string_view text) {
  const auto fits = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  return !text.empty() && text.size() <= 96 && text.front() != '.' && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), fits) && text.find("..") == std::string_view::npos &&
         text.find("--") == std::string_view::npos;
}

// One that is not set stays as it is written.
std::string with_variables(std::string_view text) {
  const auto of_name = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  std::string out;
  size_t done = 0;
  for (size_t at; (at = text.find('$', done)) != std::string_view::npos;) {
    const bool braces = text.substr(at).starts_with("${");
    const size_t begin = at + (braces ? 2 : 1);
    const auto after = std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), of_name);
    const size_t end = braces ? text.find('}', begin) : static_cast<size_t>(after - text.begin());
    const char* value =
        end == std::string_view::npos ? nullptr : std::getenv(std::string(text.substr(begin, end - begin)).c_str());
    out += text.substr(done, at - done);
    out += value != nullptr ? value : "$";
    done = value != nullptr ? end + (braces ? 1 : 0) : at + 1;
  }
  out += text.substr(done);
  return out;
}

}  // namespace

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string path_variable(const char* name) {
  std::string text = variable(name);
  if (text.starts_with('~')) {
    const size_t end = std::min(text.find('/'), text.size());
    const std::string user = text.substr(1, end - 1);
    const std::string home = user.empty() ? home_folder() : home_folder_of(user);
    if (user.empty() || !home.empty()) text.replace(0, end, home);
  }
  return with_variables(text);
}

std::string hub_home() {
  if (std::string home = path_variable("HF_HOME"); !home.empty()) return home;
  if (const std::string xdg = path_variable("XDG_CACHE_HOME"); !xdg.empty()) return xdg + "/huggingface";
  return home_folder() + "/.cache/huggingface";
}

std::string hub_cache() {
  const std::string cache = path_variable("HF_HUB_CACHE");
  return cache.empty() ? hub_home() + "/hub" : cache;
}

std::string HubName::text() const {
  return repository + (revision == "main" ? "" : "@" + revision) + (file.empty() ? "" : ":" + file);
}

bool is_plain_relative_path(std::string_view path) {
  if (path.empty() || path.size() > 1024) return false;
  const auto unfit = [](unsigned char c) { return c < 0x20 || c == 0x7f || c == '\\'; };
  if (std::any_of(path.begin(), path.end(), unfit)) return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == ".." || part.size() > 255) return false;
    begin = end + 1;
  }
  return true;
}

std::optional<HubName> parse_hub_name(std::string_view text) {
  HubName name;
  if (const size_t colon = text.find(':'); colon != std::string_view::npos) {
    name.file = text.substr(colon + 1);
    text = text.substr(0, colon);
    if (!is_plain_relative_path(name.file)) return std::nullopt;
  }
  if (const size_t at = text.find('@'); at != std::string_view::npos) {
    name.revision = text.substr(at + 1);
    text = text.substr(0, at);
    if (!is_plain_relative_path(name.revision)) return std::nullopt;
  }
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos || !is_name(text.substr(0, slash)) || !is_name(text.substr(slash + 1))) {
    return std::nullopt;
  }
  name.repository = text;
  return name;
}

std::string hub_folder(const std::string& cache, const std::string& repository) {
  const size_t slash = repository.find('/');
  return cache + "/models--" + repository.substr(0, slash) + "--" + repository.substr(slash + 1);
}

Result<std::string> find_in_hub_cache(const HubName& name) { return find_in_hub_cache_at(hub_cache(), name); }

Result<std::string> find_in_hub_cache_at(const std::string& cache, const HubName& name) {
  const std::string folder = hub_folder(cache, name.repository);
  std::error_code ignored;
  std::string commit = name.revision;
  if (auto ref = read_text_file(folder + "/refs/" + name.revision, 256); ref.ok()) {
    commit = std::move(ref).value();
    while (!commit.empty() && (commit.back() == '\n' || commit.back() == ' ')) commit.pop_back();
  }
  const std::string snapshot = folder + "/snapshots/" + commit;
  const bool there =
      commit.find('/') == std::string::npos && is_plain_relative_path(commit) && fs::is_directory(snapshot, ignored);
  if (there && name.file.empty()) return snapshot;
  if (there && fs::exists(snapshot + "/" + name.file, ignored)) return snapshot + "/" + name.file;
  return error(
      ErrorCode::kNotFound,
      "{}: no such file or directory, and not in the Hugging Face cache ({}); download it with: nestedfp pull {}",
      name.text(), cache, name.text());
}

}  // namespace nfp
