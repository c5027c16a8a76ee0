// The Hugging Face cache as its clients lay it out, and names of models in it:
//
//   models--ORG--NAME/refs/REVISION                 the commit that a branch or tag was at
//   models--ORG--NAME/snapshots/COMMIT/FILE         a link to ../../blobs/ETAG
//   models--ORG--NAME/blobs/ETAG                    the bytes; ETAG.incomplete while they arrive
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp {

// What a variable of the environment holds, empty where there is none.
std::string variable(const char* name);
// The path that a variable of the environment holds, empty where there is none. A leading ~ and variables in it ($HOME,
// ${HOME}) are put in as Hugging Face's clients do: files that set variables for services do not.
std::string path_variable(const char* name);

// HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub.
std::string hub_cache();
// HF_HOME and what stands for it: where the token lies.
std::string hub_home();

// A model of the hub, as people write it: org/name, org/name@REVISION, org/name:FILE, org/name@REVISION:FILE.
struct HubName {
  std::string repository;         // "org/name"
  std::string revision = "main";  // branch, tag or commit
  std::string file;               // a GGUF file inside; empty = the model that the repository is

  std::string text() const;
};

// Nothing for what cannot be one, such as a path.
std::optional<HubName> parse_hub_name(std::string_view text);

// Whether `path` names a file below a folder and can name none outside it: no empty part, no "." or "..", no backslash
// or control character.
bool is_plain_relative_path(std::string_view path);

// The folder of a repository, there or not.
std::string hub_folder(const std::string& cache, const std::string& repository);

// The snapshot (a directory) or the GGUF file in it that `name` means. kNotFound where it is not in the cache; the
// message names the command that downloads it.
Result<std::string> find_in_hub_cache(const HubName& name);
Result<std::string> find_in_hub_cache_at(const std::string& cache, const HubName& name);

}  // namespace nfp
