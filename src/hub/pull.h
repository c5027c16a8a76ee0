// From the hub into the Hugging Face cache: what `nestedfp pull` does.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "hub/hub_api.h"

namespace nfp {

struct PullOptions {
  HubAccess access;
  std::string cache;                        // hub_cache()
  int jobs = 4;                             // files at a time
  bool dry_run = false;                     // download no weights
  const std::atomic<bool>* stop = nullptr;  // may be null
  ProgressCallback progress;                // bytes of all files; may be empty
  // Asked once all but the weights are there, with the snapshot's folder: an error ends the pull before gigabytes are
  // fetched that cannot be used. Not asked for GGUF files.
  std::function<Status(const std::string& snapshot)> check;
  std::chrono::milliseconds retry_delay{1000};
};

struct PulledModel {
  std::string commit;
  std::string snapshot;        // folder
  std::string path;            // what ModelSource::open takes: the snapshot, or the GGUF file in it
  HubName name;                // by which it opens from now on: of a GGUF file's parts, the first
  std::vector<HubFile> files;  // all that the model needs
  uint64_t bytes = 0;          // of them
  uint64_t fetched = 0;        // of these, what was not there before
};

// Downloads what is missing; a second call finds everything. Stopped at any point it leaves whole files and .incomplete
// ones, from which the next call goes on. refs/ names the commit only when all files are there, so that a model that is
// half there is not taken for one.
Result<PulledModel> pull(const HubName& name, const PullOptions& options);

}  // namespace nfp
