// One request for embeddings from start to end: inputs to tokens, one pooled engine request for each, hidden states to
// vectors. A batch goes through the engine a window at a time, so that it does not fill the queue.
#pragma once

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "server/api/embedding_request.h"
#include "server/http/http.h"
#include "server/serve/server_state.h"

namespace nfp::server {

class Embedding final : public LiveRequest, public std::enable_shared_from_this<Embedding> {
 public:
  // As Generation's.
  Embedding(ServerState* state, std::shared_ptr<http::Exchange> exchange, EmbeddingRequest request,
            std::string request_id, std::vector<http::Header> headers, std::stop_source stop, http::ByteLease lease);
  ~Embedding() override;

  // Prepares here, `on_worker` or on the exchange's thread; then runs on the latter.
  void start(bool on_worker);
  void cut_off() override;

 private:
  static constexpr size_t kWindow = 64;  // inputs in the engine at once

  MaybeError prepare();
  void run();
  // Fills the window. Where the queue is full, what is in the engine goes on, and the rest waits for it.
  void submit_more();
  void on_output(size_t index, RequestOutput output);
  void respond();
  void cancel_all();
  void fail(const ApiError& error);
  void log_end(int status, std::string_view outcome) const;
  std::string engine_id(size_t index) const;

  ServerState* state_;
  std::shared_ptr<http::Exchange> exchange_;
  EmbeddingRequest request_;
  std::string request_id_;
  std::vector<http::Header> headers_;
  std::stop_source stop_;
  http::ByteLease lease_;
  std::string id_;
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<std::vector<float>> embeddings_;  // [input][dimensions]
  Usage usage_;                                 // of all inputs that are done
  size_t submitted_ = 0, done_ = 0;
  bool ended_ = false;
  std::chrono::steady_clock::time_point arrival_ = std::chrono::steady_clock::now();
};

// Cut to the first `dimensions`, then to length 1 where that is wanted; zeros stay zeros.
void finish_embedding(std::vector<float>& values, size_t dimensions, bool normalize);
// Base64 (RFC 4648) of the numbers' bytes, little-endian FP32.
void append_base64(std::string& out, const std::vector<float>& values);

}  // namespace nfp::server
