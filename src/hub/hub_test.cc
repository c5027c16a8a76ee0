// The hub's answers, the choice of files and one file's download, against a client that answers from memory.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <fstream>
#include <thread>

#include "base/mapped_file.h"
#include "hub/blob_download.h"
#include "hub/checksum.h"
#include "hub/file_choice.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

using namespace std::chrono_literals;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string digest(const std::string& kind, const std::string& text) {
  Checksum checksum(kind, text.size());
  checksum.add(bytes_of(text));
  return checksum.hex();
}

const std::string kSha256(64, '0'), kGit(40, '0');

TEST(Checksum, ThoseOfGitAndOfLargeFiles) {
  // `printf hello | git hash-object --stdin`, `printf hello | sha256sum`, and those of no bytes.
  EXPECT_EQ(digest(kGit, "hello"), "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0");
  EXPECT_EQ(digest(kSha256, "hello"), "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824");
  EXPECT_EQ(digest(kGit, ""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
  EXPECT_EQ(digest(kSha256, ""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Checksum checksum(kSha256, 5);
  checksum.add(bytes_of("wrong"));
  checksum.reset();
  checksum.add(bytes_of("hel"));
  checksum.add(bytes_of("lo"));
  EXPECT_EQ(checksum.hex(), digest(kSha256, "hello"));
}

std::string answer(const std::string& files) {
  return R"({"sha": ")" + std::string(40, 'a') + R"(", "siblings": [)" + files + "]}";
}

std::string entry(const std::string& path, bool large = false) {
  return R"({"rfilename": ")" + path + R"(", "size": 7, "blobId": ")" + std::string(40, 'b') + "\"" +
         (large ? R"(, "lfs": {"sha256": ")" + std::string(64, 'c') + R"(", "size": 9, "pointerSize": 3})" : "}");
}

TEST(HubModelTest, FilesWithSizesAndChecksums) {
  const auto model =
      parse_hub_model(answer(entry("config.json") + "," + entry("a/model.safetensors", true) + "}"), "m");
  ASSERT_TRUE(model.ok()) << model.error().message;
  EXPECT_EQ(model->commit, std::string(40, 'a'));
  ASSERT_EQ(model->files.size(), 2u);
  EXPECT_EQ(model->files[0].etag, std::string(40, 'b'));
  EXPECT_EQ(model->files[0].size, 7u);
  EXPECT_EQ(model->files[1].path, "a/model.safetensors");
  EXPECT_EQ(model->files[1].etag, std::string(64, 'c'));
  EXPECT_EQ(model->files[1].size, 9u);
}

TEST(HubModelTest, WhatIsNoAnswerOfAHubIsRefused) {
  for (const std::string& bad :
       {std::string("<html>"), std::string("[]"), std::string("{}"), std::string(R"({"sha": "main", "siblings": []})"),
        std::string(R"({"sha": ")" + std::string(40, 'a') + "\"}"), answer("3"), answer("{}"), answer(entry("../x")),
        answer(entry("/etc/passwd")), answer(entry("a/../../x")), answer(entry("a\\\\b")), answer(entry("a\\u0000b")),
        answer(R"({"rfilename": "a"})"), answer(R"({"rfilename": "a", "size": 1, "blobId": "../../x"})"),
        answer(R"({"rfilename": "a", "size": -1, "blobId": ")" + std::string(40, 'b') + "\"}"),
        std::string(1000, '[')}) {
    const auto model = parse_hub_model(bad, "the model");
    ASSERT_FALSE(model.ok()) << bad;
    EXPECT_NE(model.error().message.find("the model"), std::string::npos);
    EXPECT_EQ(model.error().message.find('\n'), std::string::npos);
    EXPECT_EQ(model.error().message.find('\0'), std::string::npos);
  }
}

HubModel repository(const std::vector<std::string>& paths) {
  HubModel model;
  for (const std::string& path : paths) model.files.push_back({path, 1, std::string(64, 'a')});
  return model;
}

std::string chosen(const HubModel& model, const std::string& file,
                   const std::map<std::string, std::string>& texts = {}) {
  const HubName name{"org/name", "main", file};
  const auto read = [&](const std::string& path) -> Result<std::string> {
    const auto place = texts.find(path);
    if (place == texts.end()) return error(ErrorCode::kNotFound, "{}: is not there", path);
    return place->second;
  };
  std::string out;
  for (const HubFile& small : descriptive_files(model, file)) out += small.path + " ";
  const auto weights = weight_files(model, name, read);
  if (!weights.ok()) return weights.error().message;
  out += "|";
  for (const HubFile& weight : *weights) out += " " + weight.path;
  return out;
}

TEST(FileChoice, OnlyWhatServingNeeds) {
  EXPECT_EQ(
      chosen(repository({".gitattributes", "README.md", "config.json", "consolidated.safetensors", "flax_model.msgpack",
                         "model.safetensors", "onnx/model.onnx", "pytorch_model.bin", "tokenizer.json"}),
             "", {{"config.json", "{}"}}),
      "config.json tokenizer.json | model.safetensors");
  const std::string index =
      R"({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}})";
  const HubModel sharded = repository({"config.json", "consolidated-1.safetensors", "m-1.safetensors",
                                       "m-2.safetensors", "model.safetensors.index.json", "x.gguf"});
  EXPECT_EQ(chosen(sharded, "", {{"config.json", "{}"}, {"model.safetensors.index.json", index}}),
            "config.json model.safetensors.index.json | m-1.safetensors m-2.safetensors");
  HubModel both = sharded;
  both.files.push_back({"model.safetensors", 1, std::string(64, 'a')});
  EXPECT_EQ(chosen(both, "", {{"config.json", "{}"}, {"model.safetensors.index.json", index}}),
            "config.json model.safetensors.index.json | model.safetensors");
  EXPECT_EQ(chosen(sharded, "x.gguf"), "| x.gguf");
  for (const char* bad :
       {R"({"weight_map": {"a": "../m-1.safetensors"}})", R"({"weight_map": {"a": "m-3.safetensors"}})"}) {
    EXPECT_NE(chosen(sharded, "", {{"config.json", "{}"}, {"model.safetensors.index.json", bad}})
                  .find("which its index names"),
              std::string::npos);
  }
  for (const char* bad : {"", "[]", "{}", R"({"weight_map": {}})", R"({"weight_map": {"a": 3}})"}) {
    EXPECT_NE(chosen(sharded, "", {{"config.json", "{}"}, {"model.safetensors.index.json", bad}}).find("org/name"),
              std::string::npos);
  }
}

// With a search of the list for each shard this would take minutes; the test's own time limit is what fails then.
TEST(FileChoice, ManyShardsAreFoundInALongList) {
  constexpr int kShards = 100'000;
  std::vector<std::string> paths = {"config.json", "model.safetensors.index.json"};
  std::string map;
  for (int i = 0; i < kShards; ++i) {
    paths.push_back(fmt::format("model-{:06}.safetensors", i));
    map += fmt::format("{}\"t{}\":\"{}\"", i > 0 ? "," : "", i, paths.back());
  }
  const auto read = [&](const std::string& path) -> Result<std::string> {
    return path == "config.json" ? std::string("{}") : "{\"weight_map\":{" + map + "}}";
  };
  const auto weights = weight_files(repository(paths), HubName{"org/name", "main", ""}, read);
  ASSERT_TRUE(weights.ok()) << weights.error().message;
  ASSERT_EQ(weights->size(), static_cast<size_t>(kShards));
  EXPECT_EQ(weights->back().path, paths.back());
}

TEST(FileChoice, NestedCheckpointsHaveTheirLowerBytesElsewhere) {
  EXPECT_EQ(
      chosen(repository({"config.json", "model.safetensors", "nestedfp/lower.safetensors", "tokenizer.gguf"}), "",
             {{"config.json",
               R"({"nestedfp": {"version": 1, "lower": "nestedfp", "source_dtype": "F16", "uppers": "nearest"}})"}}),
      "config.json tokenizer.gguf | model.safetensors nestedfp/lower.safetensors");
}

TEST(FileChoice, GgufFiles) {
  EXPECT_EQ(chosen(repository({"README.md", "only.gguf"}), ""), "| only.gguf");
  // The part for images is no model of text.
  const HubModel images = repository({"mmproj-F16.gguf", "only.gguf", "sub/only.mmproj-Q8_0.gguf"});
  EXPECT_EQ(chosen(images, ""), "| only.gguf");
  EXPECT_EQ(chosen(images, "mmproj-F16.gguf"), "| mmproj-F16.gguf");
  HubModel several =
      repository({"q4.gguf", "q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf", "q9-00002-of-00002.gguf"});
  several.files[0].size = uint64_t{3} << 29;
  EXPECT_EQ(
      chosen(several, ""),
      "org/name: holds 2 GGUF files; choose one with --file: q4.gguf (1.50 GiB), q8-00001-of-00002.gguf (0.0 KiB)");
  for (const char* part : {"q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf"}) {
    EXPECT_EQ(chosen(several, part), "| q8-00001-of-00002.gguf q8-00002-of-00002.gguf");
  }
  EXPECT_EQ(chosen(several, "q9-00002-of-00002.gguf"),
            "org/name: has no q9-00001-of-00002.gguf, one of the 2 parts of that model");
  EXPECT_EQ(chosen(repository({"sub/m-00001-of-00003.gguf", "sub/m-00002-of-00003.gguf"}), ""),
            "org/name: has no sub/m-00003-of-00003.gguf, one of the 3 parts of that model");
  for (const char* whole : {"art-of-war.gguf", "m-0001-of-00002.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf",
                            "m-+0001-of-00002.gguf", "-00002-of-00002.gguf"}) {
    EXPECT_EQ(chosen(repository({whole}), ""), std::string("| ") + whole);
  }
  EXPECT_NE(chosen(several, "none.gguf").find("has no file none.gguf"), std::string::npos);
  EXPECT_NE(chosen(repository({"a.bin"}), "").find("pickled"), std::string::npos);
  EXPECT_NE(chosen(repository({}), "").find("no safetensors or GGUF file"), std::string::npos);
  EXPECT_NE(chosen(repository({"model.safetensors"}), "").find("config.json"), std::string::npos);
  EXPECT_NE(chosen(repository({"a.bin"}), "a.bin").find("chooses a GGUF file"), std::string::npos);
}

TEST(PrintableUrl, CarriesNoSecret) {
  EXPECT_EQ(printable_url("https://name:password@hub/a@b/c?signature=secret"), "https://hub/a@b/c");
  EXPECT_EQ(printable_url("https://name:pass@word@hub"), "https://hub");
  EXPECT_EQ(printable_url("https://hub/a@b"), "https://hub/a@b");
  EXPECT_EQ(printable_url("hub?x"), "hub");
  HttpReply reply;
  reply.status = 404;
  const Error error = refusal(reply, {"https://name:password@hub", ""}, {"org/name", "main", ""}, "a file");
  EXPECT_NE(error.message.find(" https://hub "), std::string::npos) << error.message;
}

TEST(Refusal, SaysWhatToDo) {
  const HubName name{"org/name", "dev", ""};
  const auto message = [&](long status, const std::string& code, const std::string& token) {
    HttpReply reply;
    reply.status = status;
    if (!code.empty()) reply.headers["x-error-code"] = code;
    return refusal(reply, {"https://hub", token}, name, "a file").message;
  };
  EXPECT_NE(message(401, "GatedRepo", "").find("accept its terms at https://hub/org/name, and set HF_TOKEN"),
            std::string::npos);
  EXPECT_NE(message(403, "GatedRepo", "t").find("use a token of that account"), std::string::npos);
  EXPECT_NE(message(401, "RepoNotFound", "").find("check the name, or set HF_TOKEN"), std::string::npos);
  EXPECT_NE(message(401, "", "t").find("your token"), std::string::npos);
  EXPECT_NE(message(404, "RevisionNotFound", "").find("has no branch, tag or commit 'dev'"), std::string::npos);
  EXPECT_NE(message(404, "EntryNotFound", "").find("a file is not there"), std::string::npos);
  EXPECT_NE(message(404, "", "").find("no such model"), std::string::npos);
  EXPECT_NE(message(429, "", "").find("HF_TOKEN"), std::string::npos);
  EXPECT_NE(message(500, "", "").find("status 500"), std::string::npos);
  // Of a store that the hub redirects to: it knows of no terms, tokens or models.
  for (const long status : {403, 404, 429}) {
    HttpReply reply;
    reply.status = status;
    reply.url = "https://store.hub/blob?signature=secret";
    EXPECT_EQ(refusal(reply, {"https://hub", ""}, name, "a file").message,
              fmt::format("org/name@dev: a file is answered with status {} by https://store.hub/blob", status));
  }
}

// Answers requests one after the other as it was told to, and keeps the requests.
class ScriptedClient : public HttpClient {
 public:
  struct Answer {
    long status = 200;
    std::string body;
    std::map<std::string, std::string> headers = {};
    bool breaks = false;  // the connection ends after the body
  };
  std::deque<Answer> answers;
  std::vector<HttpRequest> requests;

  Result<HttpReply> fetch(const HttpRequest& request, const BodySink& sink, const std::atomic<bool>* stop) override {
    requests.push_back(request);
    if (stop != nullptr && stop->load()) return error(ErrorCode::kCancelled, "stopped");
    if (answers.empty()) return error(ErrorCode::kUnsupported, "the script is over");
    const Answer now = answers.front();
    answers.pop_front();
    HttpReply reply;
    reply.status = now.status;
    reply.headers = now.headers;
    if (now.status / 100 == 2) {
      for (size_t i = 0; i < now.body.size(); i += 3) {
        const std::string part = now.body.substr(i, 3);
        NFP_RETURN_IF_ERROR(sink(reply, bytes_of(part)));
      }
    }
    if (now.breaks) return error(ErrorCode::kIo, "the connection ended");
    return reply;
  }
};

class BlobDownloadTest : public testing::ScratchTest {
 protected:
  void SetUp() override {
    ScratchTest::SetUp();
    what_.access = &access_;
    what_.name = {"org/name", "main", ""};
    what_.commit = "c";
    what_.blobs = dir_;
    what_.lock = path("lock");
    what_.retry_delay = 1ms;
    what_.progress = [this](int64_t bytes) { told_ += bytes; };
    expect("0123456789");
  }
  void expect(const std::string& text) { what_.file = {"f", text.size(), digest(kSha256, text)}; }
  std::string blob() { return read_text_file(path(what_.file.etag)).value(); }
  std::string incomplete() {
    const auto text = read_text_file(path(what_.file.etag + ".incomplete"));
    return text.ok() ? *text : "none";
  }
  void put_incomplete(const std::string& text) { std::ofstream(path(what_.file.etag + ".incomplete")) << text; }
  std::string failure() {
    const Status status = download_blob(client_, what_);
    EXPECT_FALSE(status.ok());
    return status.ok() ? "" : status.error().message;
  }

  HubAccess access_{"https://hub", "secret"};
  BlobDownload what_;
  ScriptedClient client_;
  int64_t told_ = 0;
};

TEST_F(BlobDownloadTest, InOneGo) {
  client_.answers = {{200, "0123456789"}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
  EXPECT_EQ(incomplete(), "none");
  EXPECT_EQ(told_, 10);
  ASSERT_EQ(client_.requests.size(), 1u);
  EXPECT_EQ(client_.requests[0].url, "https://hub/org/name/resolve/c/f");
  EXPECT_EQ(client_.requests[0].token, "secret");
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(client_.requests.size(), 1u) << "what is there is not asked for again";
}

TEST_F(BlobDownloadTest, GoesOnWhereItEnded) {
  put_incomplete("0123");
  EXPECT_EQ(bytes_there(dir_, what_.file), 4u);
  client_.answers = {{206, "45", {{"content-range", "bytes 4-9/10"}}, true},
                     {206, "6789", {{"content-range", "bytes 6-9/10"}}}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
  EXPECT_EQ(told_, 6);
  EXPECT_EQ(client_.requests[0].offset, 4u);
  EXPECT_EQ(client_.requests[1].offset, 6u);
}

TEST_F(BlobDownloadTest, AServerWithoutRangesSendsAllOfItAgain) {
  put_incomplete("012");
  client_.answers = {{200, "0123456789"}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
  EXPECT_EQ(told_, 7);
}

TEST_F(BlobDownloadTest, AnotherPartThanAskedForIsRefused) {
  put_incomplete("012");
  client_.answers = {{206, "789", {{"content-range", "bytes 7-9/10"}}}};
  EXPECT_NE(failure().find("another part"), std::string::npos);
  EXPECT_EQ(incomplete(), "012");
}

TEST_F(BlobDownloadTest, DamageInWhatWasThereIsFoundAndMended) {
  put_incomplete("01x3");
  client_.answers = {{206, "456789", {{"content-range", "bytes 4-9/10"}}}, {200, "0123456789"}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
  EXPECT_EQ(client_.requests[1].offset, 0u);
}

TEST_F(BlobDownloadTest, AWrongChecksumLeavesNothing) {
  client_.answers = {{200, "0123456788"}};
  EXPECT_NE(failure().find("SHA-256"), std::string::npos);
  EXPECT_EQ(incomplete(), "");
  EXPECT_FALSE(read_text_file(path(what_.file.etag)).ok());
  EXPECT_EQ(told_, 0);
}

TEST_F(BlobDownloadTest, MoreThanWasListedIsRefused) {
  client_.answers = {{200, "0123456789ab"}};
  EXPECT_NE(failure().find("more bytes"), std::string::npos);
}

TEST_F(BlobDownloadTest, ABiggerFileThanTheHubsIsStartedOver) {
  put_incomplete("0123456789abcdef");
  EXPECT_EQ(bytes_there(dir_, what_.file), 0u);
  client_.answers = {{200, "0123456789"}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
}

TEST_F(BlobDownloadTest, ARangeThatTheServerDoesNotHaveStartsOver) {
  put_incomplete("012345678");
  client_.answers = {{416, ""}, {200, "0123456789"}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
}

TEST_F(BlobDownloadTest, PassingTroubleIsWaitedOut) {
  client_.answers = {{503, ""},
                     {200, "0123", {}, true},
                     {429, "", {{"retry-after", "0"}}},
                     {206, "456789", {{"content-range", "bytes 4-9/10"}}}};
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "0123456789");
}

TEST(FetchHubModel, ALongWaitIsTold) {
  HttpReply reply;
  EXPECT_EQ(asked_delay(reply), 0s);
  reply.headers["retry-after"] = "130";
  EXPECT_EQ(asked_delay(reply), 130s);
  reply.headers["retry-after"] = "100000";
  EXPECT_EQ(asked_delay(reply), 300s);
  ScriptedClient client;
  client.answers = {{429, "", {{"retry-after", "130"}}}};
  std::atomic<bool> stop{false};
  std::thread stops([&] {
    std::this_thread::sleep_for(100ms);
    stop = true;
  });
  ::testing::internal::CaptureStderr();
  const auto model = fetch_hub_model(client, HubAccess(), {"org/name", "main", ""}, 1ms, &stop);
  const std::string told = ::testing::internal::GetCapturedStderr();
  stops.join();
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.error().code, ErrorCode::kCancelled);
  EXPECT_NE(told.find("try again later; with HF_TOKEN set it takes more; trying again in 130 s"), std::string::npos)
      << told;
}

TEST(FetchHubModel, ABusyHubIsWaitedFor) {
  const HubAccess access{"https://hub", "secret"};
  const HubName name{"org/name", "main", ""};
  const std::string list = R"({"sha": "0123456789012345678901234567890123456789", "siblings": []})";
  ScriptedClient client;
  client.answers = {{503, ""}, {429, "", {{"retry-after", "0"}}}, {200, list}};
  const auto model = fetch_hub_model(client, access, name, 1ms, nullptr);
  ASSERT_TRUE(model.ok()) << model.error().message;
  EXPECT_EQ(model->commit, "0123456789012345678901234567890123456789");
  for (const auto& [status, words] :
       {std::pair(429, "takes no more requests now"), {503, "answered with status 503"}}) {
    client.answers.assign(10, {status, ""});
    const auto refused = fetch_hub_model(client, access, name, 1ms, nullptr);
    ASSERT_FALSE(refused.ok());
    // A hub that answers is there, and the one that was meant.
    EXPECT_EQ(refused.error().message.find("is there a network"), std::string::npos) << refused.error().message;
    EXPECT_NE(refused.error().message.find(words), std::string::npos) << refused.error().message;
    EXPECT_TRUE(refused.error().message.ends_with("(tried 5 times)")) << refused.error().message;
    EXPECT_EQ(client.answers.size(), 5u);
  }
  client.requests.clear();
  client.answers.assign(10, {404, ""});
  EXPECT_FALSE(fetch_hub_model(client, access, name, 1ms, nullptr).ok());
  EXPECT_EQ(client.requests.size(), 1u);
}

TEST_F(BlobDownloadTest, TriesAreCountedOnlyWhileNothingArrives) {
  for (char digit = '0'; digit < '8'; ++digit) {
    const std::string range = std::string("bytes ") + digit + "-9/10";
    client_.answers.push_back({digit == '0' ? 200 : 206, std::string(1, digit), {{"content-range", range}}, true});
  }
  for (int i = 0; i < 10; ++i) client_.answers.push_back({500, ""});
  EXPECT_NE(failure().find("tried 5 times"), std::string::npos);
  EXPECT_EQ(client_.requests.size(), 8u + 5u);
  EXPECT_EQ(incomplete(), "01234567");
}

// What is sent again after a start over is nothing new: it would be downloaded for ever.
TEST_F(BlobDownloadTest, AFileThatIsShorterThanTheHubListsIsGivenUp) {
  for (int i = 0; i < 20; ++i) {
    client_.answers.push_back({200, "01234567"});
    client_.answers.push_back({416, ""});
  }
  const std::string line = failure();
  EXPECT_NE(line.find("the server has no more than 8 of the 10 bytes that the hub lists"), std::string::npos) << line;
  EXPECT_NE(line.find("tried 5 times"), std::string::npos) << line;
  EXPECT_EQ(client_.requests.size(), 1u + 5u);
}

TEST_F(BlobDownloadTest, AServerWithoutRangesThatNeverSendsAllIsGivenUp) {
  for (int i = 0; i < 20; ++i) {
    client_.answers.push_back({200, "012345", {}, true});
    client_.answers.push_back({200, "012", {}, true});
  }
  EXPECT_NE(failure().find("tried 5 times"), std::string::npos);
  EXPECT_EQ(client_.requests.size(), 1u + 5u);
}

TEST_F(BlobDownloadTest, RefusalsAreNotRepeated) {
  client_.answers = {{403, "", {{"x-error-code", "GatedRepo"}}}};
  EXPECT_NE(failure().find("gated"), std::string::npos);
  EXPECT_EQ(client_.requests.size(), 1u);
}

TEST_F(BlobDownloadTest, AStopKeepsWhatIsThere) {
  std::atomic<bool> stop{false};
  what_.stop = &stop;
  what_.progress = [&](int64_t) { stop.store(true); };
  client_.answers = {{200, "012", {}, true}};
  const Status status = download_blob(client_, what_);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kCancelled);
  EXPECT_EQ(incomplete(), "012");
}

TEST_F(BlobDownloadTest, EmptyFilesNeedNoRequest) {
  expect("");
  ASSERT_TRUE(download_blob(client_, what_).ok());
  EXPECT_EQ(blob(), "");
  EXPECT_TRUE(client_.requests.empty());
}

TEST_F(BlobDownloadTest, ALinkInThePlaceOfTheFileIsNotFollowed) {
  std::ofstream(path("elsewhere")) << "mine";
  std::filesystem::create_symlink("elsewhere", path(what_.file.etag + ".incomplete"));
  client_.answers = {{200, "0123456789"}};
  EXPECT_NE(failure().find("cannot be written"), std::string::npos);
  EXPECT_EQ(read_text_file(path("elsewhere")).value(), "mine");
}

}  // namespace
}  // namespace nfp
