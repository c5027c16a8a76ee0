// One request for text from start to end: prompts to tokens, one engine request for each choice, outputs to JSON, in
// one piece or as a stream of events.
#pragma once

#include <chrono>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "server/http/http.h"
#include "server/serve/answer_writer.h"
#include "server/serve/server_state.h"

namespace nfp::server {

class Generation final : public LiveRequest, public std::enable_shared_from_this<Generation> {
 public:
  // `stop` ends the preparation when the client goes away; `lease` is for what `request` holds.
  Generation(ServerState* state, std::shared_ptr<http::Exchange> exchange, GenerationRequest request,
             std::string request_id, std::vector<http::Header> headers, std::stop_source stop, http::ByteLease lease);
  ~Generation() override;

  // Prepares here, `on_worker` or on the exchange's thread; compiles the grammar elsewhere; then runs on the exchange's
  // thread.
  void start(bool on_worker);
  void cut_off() override;

 private:
  struct Prepared {
    std::vector<std::vector<int32_t>> prompts;
    std::vector<std::string> prompt_texts;  // for echo
    Compiled constraint;
    bool thinking = false;  // the prompt ends with the mark that opens thoughts
  };

  bool forced_call() const;
  MaybeError prepare(Prepared* out) const;
  void prepared(std::shared_ptr<Prepared> what, MaybeError failure, bool on_worker);
  void compile(std::shared_ptr<Prepared> what, bool on_worker);
  void run(Prepared prepared);
  void set_parser(Choice& choice, bool thinking, bool* needs_special) const;
  MaybeError submit_all(Prepared& prepared);
  void on_output(size_t index, RequestOutput output);
  std::vector<ToolEvent> take(Choice& choice, RequestOutput& output);
  // What the text is made of; calls get their ids.
  std::vector<ToolEvent> read(Choice& choice, std::string text) const;
  void choice_done();
  void cancel_all();
  void fail(const ApiError& error);
  void finish_stream();
  void respond_whole();
  void log_end(std::string_view outcome) const;

  ServerState* state_;
  std::shared_ptr<http::Exchange> exchange_;
  GenerationRequest request_;
  std::string request_id_;
  std::vector<http::Header> headers_;
  std::stop_source stop_;
  http::ByteLease lease_;
  GrammarSpec grammar_;  // what the answer must follow, a forced tool call included
  std::unique_ptr<AnswerWriter> writer_;
  std::vector<Choice> choices_;  // prompts x best_of
  size_t unfinished_ = 0;
  bool streaming_ = false;  // the head has been sent
  bool ended_ = false;
  std::chrono::steady_clock::time_point arrival_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point first_token_;
  std::string scratch_;
};

}  // namespace nfp::server
