// One request for embeddings from start to end: inputs to tokens, one pooled engine request for each, hidden states to
// vectors. A batch goes through the engine a window at a time, so that it does not fill the queue.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/api/embedding_request.h"
#include "server/serve/live_request.h"

namespace nfp::server {

class Embedding final : public LiveRequest {
 public:
  Embedding(ServerState* state, RequestContext context, EmbeddingRequest request);

 private:
  static constexpr size_t kWindow = 64;  // inputs in the engine at once

  const std::vector<std::string>& ignored() const override { return request_.common.ignored; }
  MaybeError prepare() override;
  void run() override;
  // Fills the window. Where the queue is full, what is in the engine goes on, and the rest waits for it.
  void submit_more();
  void on_output(size_t index, RequestOutput output);
  void respond();
  void cancel_all() override;
  void fail(const ApiError& error) override;
  void log_disconnected() const override { log_end("disconnected"); }
  void log_end(std::string_view outcome) const;
  std::string engine_id(size_t index) const;
  std::shared_ptr<Embedding> self() { return std::static_pointer_cast<Embedding>(shared_from_this()); }

  EmbeddingRequest request_;
  std::string id_;
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<std::vector<float>> embeddings_;  // [input][dimensions]
  Usage usage_;                                 // of all inputs that are done
  size_t submitted_ = 0, done_ = 0;
};

// Cut to the first `dimensions`, then to length 1 where that is wanted; zeros stay zeros.
void finish_embedding(std::vector<float>& values, size_t dimensions, bool normalize);
// Base64 (RFC 4648) of the numbers' bytes, little-endian FP32.
void append_base64(std::string& out, const std::vector<float>& values);

}  // namespace nfp::server
