// What all forms of an answer share: what has come of it, and the interface of those who write it for a client.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/api/generation_request.h"
#include "server/serve/served_model.h"
#include "server/tools/tool_call_parser.h"
#include "text/detokenizer.h"

namespace nfp::server {

// Log-probabilities as parallel lists of JSON (completions) or a list of objects (chat), grown token by token.
struct LogprobLists {
  std::string tokens, logprobs, tops, offsets;  // completions
  std::string content;                          // chat
  int64_t offset = 0;                           // code points so far
  std::optional<StreamingDetokenizer> text;     // the answer's, for completions
  bool empty() const { return tokens.empty() && content.empty(); }
  size_t bytes() const { return tokens.size() + logprobs.size() + tops.size() + offsets.size() + content.size(); }
  void clear();  // but for `offset` and `text`
  // Appends `content` to another list, and is empty then.
  void move_content(std::string* list);
  // Puts others, of completions, before its own.
  void prepend(const LogprobLists& others);
};

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;
};

// Of an answer that is told in one piece: text, thoughts or a call.
struct AnswerPart {
  ToolEvent::Kind kind = ToolEvent::Kind::kText;  // kCall with its arguments
  std::string text;
  size_t call = 0;       // index in Choice::calls
  std::string logprobs;  // of text in the Responses API
};

// One answer: what has come of it.
struct Choice {
  size_t prompt = 0;  // index of the prompt
  int sample = 0;     // which of its answers
  int index = 0;      // as told to the client
  std::string engine_id;
  std::vector<AnswerPart> parts;  // in the order in which the model wrote them; without a stream
  std::string prompt_text;        // with echo
  std::vector<OutputToken> prompt_logprobs;
  LogprobLists echoed;  // the prompt's, without a stream
  LogprobLists logprobs;
  ToolEvent::Kind now = ToolEvent::Kind::kText;  // what the last token that showed was of
  int32_t reasoning_tokens = 0;
  std::unique_ptr<ToolCallParser> parser;
  std::vector<ToolCall> calls;
  std::vector<int32_t> prompt_ids;  // with return_token_ids
  std::vector<int32_t> ids;         // likewise, those that have not been written
  std::optional<FinishReason> finish;
  std::string stop_reason;  // JSON: null, a number, a string
  Usage usage;
  double score = 0;  // sum of log-probabilities
};

// All parts of a kind.
std::string join(const Choice& choice, ToolEvent::Kind kind);
// Arguments that the model wrote, cut off perhaps, as an object.
std::string object_or_empty(const std::string& arguments);
// The same with those of their members that are whole, as Anthropic's packages read the events of a stream.
std::string object_so_far(const std::string& arguments);
// Whether a stop string or a stop token cut the last call in the middle: then it is not for the client to make.
bool has_cut_call(const Choice& choice);

// One dialect: how an answer looks in one piece, and as a stream of server-sent events (each appended with its end).
class AnswerWriter {
 public:
  AnswerWriter(const GenerationRequest* request, const ServedModel* model, std::string id, int64_t created);
  virtual ~AnswerWriter() = default;

  // Adds tokens to the lists. `echo`: they are the prompt, of which this text is shown, and the first of them has no
  // log-probability.
  void add_logprobs(std::span<const OutputToken> tokens, std::optional<std::string_view> echo,
                    LogprobLists* lists) const;

  // Before the events of any choice, for each in turn; the usage of the first that has a token has the prompt's counts,
  // and that of others its tokens.
  virtual void begin(std::string& out, Choice& choice) = 0;
  // What came of one step; `final`: the choice has ended. Takes choice.logprobs and choice.ids.
  virtual void events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) = 0;
  // All choices have ended.
  virtual void end(std::string& out, std::span<const Choice> choices) = 0;
  // Instead of end(): an error in a stream that has begun.
  virtual void failure(std::string& out, const ApiError& error) = 0;

  // The whole answer. `choices` are those to be shown; `all` also those that best_of dropped.
  virtual std::string whole(std::span<const Choice* const> choices, std::span<const Choice> all) = 0;
  virtual http::Response refusal(const ApiError& error) const = 0;

  const std::string& id() const { return id_; }

 protected:
  std::string token_text(int32_t token) const;
  // A prompt counts once, however many answers it gets.
  Usage sum(std::span<const Choice> choices) const;
  static void append_precision(std::string& out, const Usage& usage);

  const GenerationRequest* request_;
  const ServedModel* model_;
  const std::string id_;
  const int64_t created_;  // seconds since 1970
};

// Log-probabilities below what clients expect are shown as this.
void append_logprob(std::string& out, double logprob);

}  // namespace nfp::server
