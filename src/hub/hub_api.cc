#include "hub/hub_api.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <thread>

#include "base/json_depth.h"
#include "base/log.h"
#include "base/mapped_file.h"

namespace nfp {
namespace {

constexpr size_t kMaxAnswer = size_t{64} << 20;  // bytes: lists of files of the largest repositories have a few MB

std::string trimmed(std::string text) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), space));
  while (!text.empty() && space(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text;
}

bool is_true(std::string value) {
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return value == "1" || value == "ON" || value == "YES" || value == "TRUE";
}

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string escaped(std::string_view text, bool keep_slash) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || c == '-' || c == '_' || c == '.' || c == '~' || (c == '/' && keep_slash)) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", byte);
    }
  }
  return out;
}

std::string string_of(const nlohmann::json& object, const char* key) {
  const auto place = object.find(key);
  return place != object.end() && place->is_string() ? place->get<std::string>() : "";
}

Result<HubFile> parse_file(const nlohmann::json& item, const std::string& name) {
  HubFile file;
  if (item.is_object()) file.path = string_of(item, "rfilename");
  if (!is_plain_relative_path(file.path)) {
    return error(ErrorCode::kInvalidInput,
                 "{}: the hub lists a file called '{}', which is no path inside a model; refused", name,
                 nlohmann::json(file.path).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
  }
  const auto lfs = item.find("lfs");
  const bool large = lfs != item.end() && lfs->is_object();
  file.etag = large ? string_of(*lfs, "sha256") : string_of(item, "blobId");
  const auto& sized = large ? *lfs : item;
  const auto size = sized.find("size");
  if (!is_hex(file.etag, large ? 64 : 40) || size == sized.end() || !size->is_number_unsigned()) {
    return error(ErrorCode::kInvalidInput,
                 "{}: the hub lists '{}' without size and checksum; is HF_ENDPOINT a hub that answers ?blobs=true?",
                 name, file.path);
  }
  file.size = size->get<uint64_t>();
  return file;
}

}  // namespace

Result<HubAccess> hub_access() {
  if (is_true(variable("HF_HUB_OFFLINE"))) {
    return error(ErrorCode::kUsage, "HF_HUB_OFFLINE is set: nothing is downloaded");
  }
  HubAccess access;
  if (std::string endpoint = trimmed(variable("HF_ENDPOINT")); !endpoint.empty()) {
    while (endpoint.ends_with('/')) endpoint.pop_back();
    if (!endpoint.starts_with("https://") && !endpoint.starts_with("http://")) {
      return error(ErrorCode::kUsage, "HF_ENDPOINT is '{}'; it must begin with https:// or http://", endpoint);
    }
    access.endpoint = std::move(endpoint);
  }
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}) {
    if (access.token.empty()) access.token = trimmed(variable(name));
  }
  if (access.token.empty()) {
    const std::string given = path_variable("HF_TOKEN_PATH");
    if (auto file = read_text_file(given.empty() ? hub_home() + "/token" : given, 4096); file.ok()) {
      access.token = trimmed(*file);
    }
  }
  if (std::any_of(access.token.begin(), access.token.end(), [](unsigned char c) { return c <= ' ' || c > '~'; })) {
    return error(ErrorCode::kUsage,
                 "the Hugging Face token (HF_TOKEN, or the token file) has characters that no token has");
  }
  return access;
}

Result<HubModel> parse_hub_model(std::string_view json, const std::string& name) {
  if (json_too_deep(json)) return error(ErrorCode::kInvalidInput, "{}: the hub's answer is nested too deep", name);
  const auto root = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return error(ErrorCode::kInvalidInput, "{}: the hub's answer is not a JSON object; is HF_ENDPOINT a hub?", name);
  }
  HubModel model;
  model.commit = string_of(root, "sha");
  if (!is_hex(model.commit, 40)) {
    return error(ErrorCode::kInvalidInput, "{}: the hub's answer has no commit ('sha'); is HF_ENDPOINT a hub?", name);
  }
  const auto siblings = root.find("siblings");
  if (siblings == root.end() || !siblings->is_array()) {
    return error(ErrorCode::kInvalidInput, "{}: the hub's answer lists no files ('siblings')", name);
  }
  for (const auto& item : *siblings) {
    NFP_ASSIGN_OR_RETURN(HubFile file, parse_file(item, name));
    model.files.push_back(std::move(file));
  }
  return model;
}

Result<HubModel> fetch_hub_model(HttpClient& client, const HubAccess& access, const HubName& name,
                                 std::chrono::milliseconds retry_delay, const std::atomic<bool>* stop) {
  HttpRequest request;
  request.url = fmt::format("{}/api/models/{}/revision/{}?blobs=true", access.endpoint, name.repository,
                            escaped(name.revision, /*keep_slash=*/false));
  request.token = access.token;
  std::string body;
  const auto keep = [&](const HttpReply&, std::span<const std::byte> part) {
    if (body.size() + part.size() > kMaxAnswer) {
      return Status(error(ErrorCode::kInvalidInput, "{}: the hub's list of files is larger than {} MiB", name.text(),
                          kMaxAnswer >> 20));
    }
    body.append(reinterpret_cast<const char*>(part.data()), part.size());
    return ok_status();
  };
  for (int tries = 1;; ++tries, retry_delay *= 2) {
    auto reply = client.fetch(request, keep, stop);
    if (!reply.ok()) {
      if (reply.error().code != ErrorCode::kIo) return std::move(reply).error();
      return error(ErrorCode::kIo, "{}; is there a network, and is {} the hub that you mean (HF_ENDPOINT)?",
                   reply.error().message, printable_url(access.endpoint));
    }
    if (reply->status == 200) return parse_hub_model(body, name.text());
    const Error problem = refusal(*reply, access, name, "the list of its files");
    if (!is_passing(*reply)) return problem;
    if (tries == kMaxTries) return error(problem.code, "{} (tried {} times)", problem.message, kMaxTries);
    NFP_RETURN_IF_ERROR(wait_to_retry(problem, std::max(retry_delay, asked_delay(*reply)), stop));
  }
}

std::string file_url(const HubAccess& access, const std::string& repository, const std::string& commit,
                     const std::string& path) {
  return fmt::format("{}/{}/resolve/{}/{}", access.endpoint, repository, commit, escaped(path, /*keep_slash=*/true));
}

bool is_passing(const HttpReply& reply) {
  return reply.status == 408 || reply.status == 425 || reply.status == 429 || reply.status >= 500;
}

std::chrono::milliseconds asked_delay(const HttpReply& reply) {
  const std::string text = reply.header("retry-after");
  int seconds = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (code != std::errc() || end != text.data() + text.size()) return {};
  return std::chrono::seconds(std::clamp(seconds, 0, 300));
}

Status wait(std::chrono::milliseconds time, const std::atomic<bool>* stop) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    if (stop != nullptr && stop->load()) return error(ErrorCode::kCancelled, "stopped");
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(std::chrono::milliseconds(50), end - std::chrono::steady_clock::now()));
  }
  return ok_status();
}

Status wait_to_retry(const Error& problem, std::chrono::milliseconds time, const std::atomic<bool>* stop) {
  if (time > std::chrono::seconds(10)) {
    log::warn("{}; trying again in {} s", problem.message, std::chrono::ceil<std::chrono::seconds>(time).count());
  }
  return wait(time, stop);
}

Error refusal(const HttpReply& reply, const HubAccess& access, const HubName& name, const std::string& what) {
  const std::string code = reply.header("x-error-code");
  // Of a store that the hub redirects to: its 403 and 404 are not about the model.
  if (code.empty() && !reply.url.empty() && !reply.url.starts_with(access.endpoint + "/")) {
    return error(ErrorCode::kIo, "{}: {} is answered with status {} by {}", name.text(), what, reply.status,
                 printable_url(reply.url));
  }
  const std::string hub = printable_url(access.endpoint);
  const std::string page = hub + "/" + name.repository;
  const std::string log_in = access.token.empty()
                                 ? "set HF_TOKEN to a token of yours that may read it"
                                 : "your token (HF_TOKEN, or the token file) may not read it, or is not valid";
  if (code == "GatedRepo" || (reply.status == 403 && code.empty())) {
    return error(ErrorCode::kUsage, "{}: is gated ({}): accept its terms at {}, and {}", name.text(), reply.status,
                 page, access.token.empty() ? "set HF_TOKEN to a token of yours" : "use a token of that account");
  }
  if (code == "RevisionNotFound") {
    return error(ErrorCode::kNotFound, "{}: has no branch, tag or commit '{}'", name.repository, name.revision);
  }
  if (code == "EntryNotFound") return error(ErrorCode::kNotFound, "{}: {} is not there (404)", name.text(), what);
  if (reply.status == 401) {
    return error(ErrorCode::kNotFound,
                 "{}: there is no such model at {}, or it is private (401): check the name, or {}", name.text(), hub,
                 log_in);
  }
  if (reply.status == 404) {
    return error(ErrorCode::kNotFound, "{}: there is no such model at {} (404): check the name", name.text(), hub);
  }
  if (reply.status == 403) {
    return error(ErrorCode::kUsage, "{}: {} is refused (403{}{}); {}", name.text(), what, code.empty() ? "" : ", ",
                 code, log_in);
  }
  if (reply.status == 429) {
    return error(ErrorCode::kIo, "{}: the hub takes no more requests now (429): try again later{}", name.text(),
                 access.token.empty() ? "; with HF_TOKEN set it takes more" : "");
  }
  return error(ErrorCode::kIo, "{}: {} is answered with status {} by {}", name.text(), what, reply.status, hub);
}

}  // namespace nfp
