// One request for text from start to end: prompts to tokens, one engine request for each choice, outputs to JSON, in
// one piece or as a stream of events.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/serve/answer_writer.h"
#include "server/serve/live_request.h"

namespace nfp::server {

class Generation final : public LiveRequest {
 public:
  Generation(ServerState* state, RequestContext context, GenerationRequest request);

 private:
  struct Prepared {
    std::vector<std::vector<int32_t>> prompts;
    std::vector<std::string> prompt_texts;  // for echo
    Compiled constraint;
    bool thinking = false;  // the prompt ends with the mark that opens thoughts
  };

  bool forced_call() const;
  bool scores_echo() const;  // the log-probabilities of the prompt's text are told
  const std::vector<std::string>& ignored() const override { return request_.ignored; }
  MaybeError prepare() override;
  MaybeError choose_allowed_tokens();
  // Grammars are compiled on threads of their own.
  void prepared(MaybeError failure, bool on_worker) override;
  void compile(bool on_worker);
  void run() override;
  void set_parser(Choice& choice, bool* needs_special) const;
  MaybeError submit_all();
  void start_stream();
  void on_output(size_t index, RequestOutput output);
  std::vector<ToolEvent> take(Choice& choice, RequestOutput& output);
  void take_logprobs(Choice& choice, RequestOutput& output);
  // Of an answer that is told in one piece.
  void keep_parts(Choice& choice, std::span<const ToolEvent> events) const;
  void keep_logprobs_of_text(Choice& choice, std::span<const ToolEvent> events) const;
  // What the text is made of; calls get their ids.
  std::vector<ToolEvent> read(Choice& choice, std::string text) const;
  void choice_done();
  void cancel_all() override;
  void fail(const ApiError& error) override;
  void log_disconnected() const override { log_end("disconnected"); }
  void finish_stream();
  void respond_whole();
  void log_end(std::string_view outcome) const;
  std::shared_ptr<Generation> self() { return std::static_pointer_cast<Generation>(shared_from_this()); }

  GenerationRequest request_;
  Prepared prepared_;    // on the thread that prepares, then on the exchange's
  GrammarSpec grammar_;  // what the answer must follow, a forced tool call included
  std::unique_ptr<AnswerWriter> writer_;
  std::vector<Choice> choices_;  // prompts x best_of
  size_t unfinished_ = 0;
  bool streaming_ = false;  // the head has been sent
  bool begun_ = false;      // and what comes before all events of choices
  size_t scores_ = 0;       // bytes of log-probabilities that an answer in one piece will have
  std::chrono::steady_clock::time_point first_token_;
  std::string scratch_;
};

}  // namespace nfp::server
