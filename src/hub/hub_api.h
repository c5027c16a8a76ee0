// What the hub says about a model, and how it says no (https://huggingface.co/docs/hub/api).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "hub/http_client.h"
#include "io/hub_cache.h"

namespace nfp {

struct HubFile {
  std::string path;   // in the repository, checked: is_plain_relative_path
  uint64_t size = 0;  // bytes
  // Name in blobs/: of a large file its SHA-256, of any other its Git SHA-1 (of "blob SIZE\0" and the bytes).
  std::string etag;
};

struct HubModel {
  std::string commit;  // hexadecimal
  std::vector<HubFile> files;
};

struct HubAccess {
  std::string endpoint = "https://huggingface.co";  // without a slash at its end
  std::string token;                                // empty = none
};

// HF_ENDPOINT; HF_TOKEN, HUGGING_FACE_HUB_TOKEN, or the file that `hf auth login` writes (HF_TOKEN_PATH,
// HF_HOME/token). kUsage where HF_HUB_OFFLINE forbids the network, or an endpoint is not a URL.
Result<HubAccess> hub_access();

// The answer of /api/models/NAME/revision/REVISION?blobs=true. Errors name `name` and the field.
Result<HubModel> parse_hub_model(std::string_view json, const std::string& name);
// A busy hub is asked kMaxTries times, with pauses as for files.
Result<HubModel> fetch_hub_model(HttpClient& client, const HubAccess& access, const HubName& name,
                                 std::chrono::milliseconds retry_delay, const std::atomic<bool>* stop);

// Where the bytes of a file are.
std::string file_url(const HubAccess& access, const std::string& repository, const std::string& commit,
                     const std::string& path);

// For people: what an answer other than 2xx means and what to do. `what` is asked for.
Error refusal(const HttpReply& reply, const HubAccess& access, const HubName& name, const std::string& what);

// Whether an answer may be another one in a while: a server under load or being restarted.
bool is_passing(const HttpReply& reply);

// Tries in a row that bring nothing.
inline constexpr int kMaxTries = 5;

// What the answer asks to wait (Retry-After), five minutes at most, after which Hugging Face counts requests anew; 0
// where it does not say.
std::chrono::milliseconds asked_delay(const HttpReply& reply);

// kCancelled where `stop`, which may be null, is set before.
Status wait(std::chrono::milliseconds time, const std::atomic<bool>* stop);
// The same because of `problem`, which is told where it takes long.
Status wait_to_retry(const Error& problem, std::chrono::milliseconds time, const std::atomic<bool>* stop);

}  // namespace nfp
