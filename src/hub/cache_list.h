// What lies in the Hugging Face cache: the models that could be opened, and what is left of downloads that did not end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nfp {

struct CachedModel {
  std::string name;    // what a verb's MODEL takes: "org/name", "org/name@REVISION", "org/name:FILE"
  std::string path;    // the snapshot's folder, or the GGUF file in it
  uint64_t bytes = 0;  // of its files
};

struct CachedDownload {
  std::string repository;  // "org/name"
  uint64_t bytes = 0;      // of its .incomplete files
};

struct CacheList {
  std::vector<CachedModel> models;         // by name
  std::vector<CachedDownload> unfinished;  // by name
};

// Models of every revision that refs/ names, and of snapshots that none names, by their commits. Empty where there is
// no such folder; what is no model is passed over.
CacheList list_hub_cache(const std::string& cache);

}  // namespace nfp
