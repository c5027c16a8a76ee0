#include "hub/pull.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/atomic_file.h"
#include "base/byte_size.h"
#include "base/mapped_file.h"
#include "hub/blob_download.h"
#include "hub/file_choice.h"
#include "hub/http_client.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

Status make_folder(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  if (!code) return ok_status();
  return error(ErrorCode::kIo, "{}: cannot be made: {}; HF_HUB_CACHE or HF_HOME name another place", path.string(),
               code.message());
}

class Pull {
 public:
  Pull(const HubName& name, const PullOptions& options, HubModel model)
      : name_(name), options_(options), model_(std::move(model)) {
    folder_ = hub_folder(options.cache, name.repository);
    blobs_ = folder_ + "/blobs";
    locks_ = options.cache + "/.locks/" + fs::path(folder_).filename().string();
    snapshot_ = folder_ + "/snapshots/" + model_.commit;
  }

  Result<PulledModel> run() {
    for (const std::string& folder : {blobs_, locks_, snapshot_}) NFP_RETURN_IF_ERROR(make_folder(folder));
    const std::vector<HubFile> small = descriptive_files(model_, name_.file);
    NFP_RETURN_IF_ERROR(fetch(small));
    const auto read = [&](const std::string& path) { return read_text_file(snapshot_ + "/" + path); };
    NFP_ASSIGN_OR_RETURN(const std::vector<HubFile> weights, weight_files(model_, name_, read));
    const bool gguf = weights.front().path.ends_with(".gguf");
    if (options_.check && !gguf) NFP_RETURN_IF_ERROR(options_.check(snapshot_));

    PulledModel pulled;
    pulled.commit = model_.commit;
    pulled.snapshot = snapshot_;
    pulled.name = name_;
    // Without a name only a GGUF file at the top is found.
    if (gguf && (!name_.file.empty() || weights.front().path.find('/') != std::string::npos)) {
      pulled.name.file = weights.front().path;
    }
    pulled.path = pulled.name.file.empty() ? snapshot_ : snapshot_ + "/" + pulled.name.file;
    for (const auto* files : {&small, &weights}) pulled.files.insert(pulled.files.end(), files->begin(), files->end());
    if (!options_.dry_run) {
      NFP_RETURN_IF_ERROR(check_space(weights));
      NFP_RETURN_IF_ERROR(fetch(weights));
      NFP_RETURN_IF_ERROR(write_ref());
    }
    for (const HubFile& file : pulled.files) pulled.bytes += file.size;
    pulled.fetched = fetched_;
    return pulled;
  }

 private:
  Status check_space(const std::vector<HubFile>& files) const {
    std::map<std::string, uint64_t> missing;  // by blob: files of equal bytes share one
    for (const HubFile& file : files) missing[file.etag] = file.size - bytes_there(blobs_, file);
    uint64_t needed = 0;
    for (const auto& [etag, bytes] : missing) needed += bytes;
    std::error_code code;
    const auto space = fs::space(blobs_, code);
    if (code || space.available >= needed) return ok_status();
    return error(ErrorCode::kIo,
                 "{}: needs {} more in {}, where {} are free; HF_HUB_CACHE or HF_HOME name another place", name_.text(),
                 human_bytes(needed), options_.cache, human_bytes(space.available));
  }

  // All of them, some at a time; the largest first, so that the last one to end is a small one.
  Status fetch(std::vector<HubFile> files) {
    std::stable_sort(files.begin(), files.end(), [](const HubFile& a, const HubFile& b) { return a.size > b.size; });
    total_ = 0;
    uint64_t there = 0;
    for (const HubFile& file : files) {
      total_ += file.size;
      there += bytes_there(blobs_, file);
    }
    done_ = static_cast<int64_t>(there);
    Shared shared;
    std::vector<std::thread> threads;
    const size_t count = std::min(files.size(), static_cast<size_t>(std::max(options_.jobs, 1)));
    try {
      for (size_t i = 0; i < count; ++i) {
        threads.emplace_back([&] {
          work(files, shared);
          ++shared.ended;
        });
      }
    } catch (const std::system_error&) {  // those that the system gives will do
      if (threads.empty()) throw;
    }
    // The threads look at one flag, which a failure among them sets as well as the caller's stop.
    while (shared.ended.load() < threads.size()) {
      if (options_.stop != nullptr && options_.stop->load()) shared.stop.store(true);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    for (std::thread& thread : threads) thread.join();
    if (!shared.failure.ok() && shared.failure.error().code == ErrorCode::kCancelled) {
      return error(ErrorCode::kCancelled, "{}: stopped; run it again to go on from here", name_.text());
    }
    return std::move(shared.failure);
  }

  struct Shared {
    std::mutex mutex;  // of all but the flags
    size_t next = 0;
    Status failure;
    std::atomic<bool> stop{false};
    std::atomic<size_t> ended{0};  // threads
  };

  void work(const std::vector<HubFile>& files, Shared& shared) {
    const auto fail = [&](Error why) {
      const std::lock_guard guard(shared.mutex);
      // What made the others stop says more than that they did.
      if (shared.failure.ok() || shared.failure.error().code == ErrorCode::kCancelled) shared.failure = std::move(why);
      shared.stop.store(true);
    };
    auto client = HttpClient::create();
    if (!client.ok()) return fail(std::move(client).error());
    while (true) {
      size_t mine = 0;
      {
        const std::lock_guard guard(shared.mutex);
        if (shared.next == files.size() || shared.stop.load()) return;
        mine = shared.next++;
      }
      if (Status status = fetch_one(**client, files[mine], shared.stop); !status.ok()) {
        return fail(std::move(status).error());
      }
    }
  }

  Status fetch_one(HttpClient& client, const HubFile& file, const std::atomic<bool>& stop) {
    BlobDownload download;
    download.access = &options_.access;
    download.name = name_;
    download.commit = model_.commit;
    download.file = file;
    download.blobs = blobs_;
    download.lock = locks_ + "/" + file.etag + ".lock";
    download.stop = &stop;
    download.progress = [&](int64_t bytes) { add_progress(bytes); };
    download.retry_delay = options_.retry_delay;
    NFP_RETURN_IF_ERROR(download_blob(client, download));
    return link(file);
  }

  void add_progress(int64_t bytes) {
    const std::lock_guard guard(progress_mutex_);
    done_ += bytes;
    if (bytes > 0) fetched_ += static_cast<uint64_t>(bytes);
    if (!options_.progress || done_ < shown_) return;
    shown_ = done_;
    options_.progress({"downloading", std::min(static_cast<uint64_t>(done_), total_), total_});
  }

  // snapshots/COMMIT/DIR/FILE -> ../../../blobs/ETAG
  Status link(const HubFile& file) const {
    const fs::path place = fs::path(snapshot_) / file.path;
    NFP_RETURN_IF_ERROR(make_folder(place.parent_path()));
    std::string target = "../../";
    for (const char c : file.path) target += c == '/' ? "../" : "";
    target += "blobs/" + file.etag;
    std::error_code code;
    if (fs::read_symlink(place, code) == target) return ok_status();
    TemporaryPath temporary(temporary_beside(place.string()),
                            [&](const std::string& path) { return ::symlink(target.c_str(), path.c_str()) == 0; });
    if (temporary.name().empty() || std::rename(temporary.name().c_str(), place.c_str()) != 0) {
      return error(ErrorCode::kIo, "{}: cannot be linked: {}", place.string(), std::strerror(errno));
    }
    temporary.release();
    return ok_status();
  }

  Status write_ref() const {
    if (name_.revision == model_.commit) return ok_status();
    const fs::path ref = fs::path(folder_) / "refs" / name_.revision;
    // A cache that has all of it may be one that only others write to.
    if (const auto there = read_text_file(ref, 256); there.ok() && *there == model_.commit) return ok_status();
    NFP_RETURN_IF_ERROR(make_folder(ref.parent_path()));
    return write_file(ref, model_.commit);
  }

  const HubName& name_;
  const PullOptions& options_;
  const HubModel model_;
  std::string folder_, blobs_, locks_, snapshot_;
  std::mutex progress_mutex_;
  uint64_t total_ = 0;  // bytes of the files being fetched
  int64_t done_ = 0;    // of them, there
  int64_t shown_ = 0;
  uint64_t fetched_ = 0;
};

}  // namespace

Result<PulledModel> pull(const HubName& name, const PullOptions& options) {
  NFP_ASSIGN_OR_RETURN(const auto client, HttpClient::create());
  NFP_ASSIGN_OR_RETURN(HubModel model,
                       fetch_hub_model(*client, options.access, name, options.retry_delay, options.stop));
  return Pull(name, options, std::move(model)).run();
}

}  // namespace nfp
