// Answers of OpenAI's Responses API: a list of items (thoughts, a message, calls of functions), and in a stream the
// typed events that build them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/serve/answer_writer.h"
#include "server/serve/response_store.h"

namespace nfp::server {

class ResponsesWriter final : public AnswerWriter {
 public:
  ResponsesWriter(const GenerationRequest* request, const ServedModel* model, ResponseStore* store, std::string id,
                  int64_t created)
      : AnswerWriter(request, model, std::move(id), created), store_(store) {}

  void begin(std::string& out, Choice& choice) override;
  void events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) override;
  void end(std::string& out, std::span<const Choice> choices) override;
  void failure(std::string& out, const ApiError& error) override;
  std::string whole(std::span<const Choice* const> choices, std::span<const Choice> all) override;
  http::Response refusal(const ApiError& error) const override { return error_response(error); }

 private:
  enum class Kind { kReasoning, kMessage, kCall };
  struct Item {
    Kind kind = Kind::kMessage;
    std::string id;
    std::string text;  // or arguments
    std::string call_id, name;
    std::string logprobs;  // entries of a JSON list
  };

  // Up to the inside of an event: its type and number.
  void event(std::string& out, std::string_view type);
  void place(std::string& out) const;  // of the open item
  Item& open(std::string& out, Kind kind, const ToolCall* call);
  void close(std::string& out, std::string_view status);
  std::string new_id(Kind kind) const;
  void append_item(std::string& out, const Item& item, std::string_view status, bool empty) const;
  void append_part(std::string& out, const Item& item, bool empty) const;
  // `choices`: for the usage, and null where the answer has not ended.
  std::string response(std::string_view status, const std::span<const Choice>* choices, const ApiError* error) const;
  // "completed" or "incomplete".
  static std::string_view status_of(const Choice& choice);
  // Of the last item: a call that a stop string cut is not whole, though the response is.
  std::string_view status_of_last(const Choice& choice) const;
  void keep(const std::string& response) const;

  ResponseStore* store_;
  std::vector<Item> items_;
  bool open_ = false;  // the last item may grow
  int64_t sequence_ = 0;
};

}  // namespace nfp::server
