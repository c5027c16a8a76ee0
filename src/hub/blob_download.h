// One file of the hub into blobs/: resumed where an earlier try ended, checked, and only then given its name.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "hub/http_client.h"
#include "hub/hub_api.h"

namespace nfp {

struct BlobDownload {
  const HubAccess* access = nullptr;
  HubName name;
  std::string commit;
  HubFile file;
  std::string blobs;                            // folder
  std::string lock;                             // path; what hf's own client locks as well
  const std::atomic<bool>* stop = nullptr;      // may be null
  std::function<void(int64_t)> progress;        // bytes that are there now and were not before; below 0 where they went
  std::chrono::milliseconds retry_delay{1000};  // doubles with every try that brought nothing
};

// Bytes of `file` that lie in `blobs` already, complete or not.
uint64_t bytes_there(const std::string& blobs, const HubFile& file);

// Makes BLOBS/ETAG. What arrived stays in BLOBS/ETAG.incomplete whatever happens, but for bytes with a wrong checksum.
Status download_blob(HttpClient& client, const BlobDownload& download);

}  // namespace nfp
