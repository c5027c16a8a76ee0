#include "server/serve/responses_writer.h"

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

void append_field(std::string& out, std::string_view name, std::string_view value) {
  out += ",\"";
  out += name;
  out += "\":";
  append_string(out, value);
}

}  // namespace

void ResponsesWriter::event(std::string& out, std::string_view type) {
  fmt::format_to(std::back_inserter(out), "event: {}\ndata: {{\"type\":\"{}\",\"sequence_number\":{}", type, type,
                 sequence_++);
}

void ResponsesWriter::place(std::string& out) const {
  const Item& item = items_.back();
  fmt::format_to(std::back_inserter(out), ",\"item_id\":\"{}\",\"output_index\":{}", item.id, items_.size() - 1);
  if (item.kind != Kind::kCall) out += ",\"content_index\":0";
}

std::string ResponsesWriter::new_id(Kind kind) const {
  const std::string_view prefix = kind == Kind::kMessage ? "msg" : kind == Kind::kCall ? "fc" : "rs";
  return fmt::format("{}_{}{:02x}", prefix, std::string_view(id_).substr(5), items_.size());
}

void ResponsesWriter::append_part(std::string& out, const Item& item, bool empty) const {
  if (item.kind == Kind::kReasoning) {
    out += "{\"type\":\"reasoning_text\"";
    append_field(out, "text", empty ? std::string_view() : item.text);
    out += '}';
    return;
  }
  out += "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[";
  if (!empty) out += item.logprobs;
  out += ']';
  append_field(out, "text", empty ? std::string_view() : item.text);
  out += '}';
}

// `empty`: as it is announced, without what it will hold.
void ResponsesWriter::append_item(std::string& out, const Item& item, std::string_view status, bool empty) const {
  out += "{\"id\":\"" + item.id + "\",\"status\":\"";
  out += status;
  switch (item.kind) {
    case Kind::kCall:
      out += "\",\"type\":\"function_call\"";
      append_field(out, "call_id", item.call_id);
      append_field(out, "name", item.name);
      append_field(out, "arguments", empty ? std::string_view() : item.text);
      break;
    case Kind::kMessage:
      out += "\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[";
      if (!empty) append_part(out, item, false);
      out += ']';
      break;
    case Kind::kReasoning:
      out += "\",\"type\":\"reasoning\",\"summary\":[],\"content\":[";
      if (!empty) append_part(out, item, false);
      out += ']';
      break;
  }
  out += '}';
}

ResponsesWriter::Item& ResponsesWriter::open(std::string& out, Kind kind, const ToolCall* call) {
  if (open_ && items_.back().kind == kind && call == nullptr) return items_.back();
  close(out, "completed");
  Item item;
  item.kind = kind;
  item.id = new_id(kind);
  if (call != nullptr) {
    item.call_id = call->id;
    item.name = call->name;
  }
  items_.push_back(std::move(item));
  open_ = true;
  event(out, "response.output_item.added");
  fmt::format_to(std::back_inserter(out), ",\"output_index\":{},\"item\":", items_.size() - 1);
  append_item(out, items_.back(), "in_progress", true);
  out += "}\n\n";
  if (kind != Kind::kCall) {
    event(out, "response.content_part.added");
    place(out);
    out += ",\"part\":";
    append_part(out, items_.back(), true);
    out += "}\n\n";
  }
  return items_.back();
}

void ResponsesWriter::close(std::string& out, std::string_view status) {
  if (!open_) return;
  open_ = false;
  const Item& item = items_.back();
  switch (item.kind) {
    case Kind::kCall:
      event(out, "response.function_call_arguments.done");
      place(out);
      append_field(out, "name", item.name);
      append_field(out, "arguments", item.text);
      break;
    case Kind::kMessage:
      event(out, "response.output_text.done");
      place(out);
      append_field(out, "text", item.text);
      out += ",\"logprobs\":[" + item.logprobs + ']';
      break;
    case Kind::kReasoning:
      event(out, "response.reasoning_text.done");
      place(out);
      append_field(out, "text", item.text);
      break;
  }
  out += "}\n\n";
  if (item.kind != Kind::kCall) {
    event(out, "response.content_part.done");
    place(out);
    out += ",\"part\":";
    append_part(out, item, false);
    out += "}\n\n";
  }
  event(out, "response.output_item.done");
  fmt::format_to(std::back_inserter(out), ",\"output_index\":{},\"item\":", items_.size() - 1);
  append_item(out, item, status, false);
  out += "}\n\n";
}

std::string_view ResponsesWriter::status_of(const Choice& choice) {
  return choice.finish == FinishReason::kLength ? "incomplete" : "completed";
}

std::string_view ResponsesWriter::status_of_last(const Choice& choice) const {
  const bool cut = items_.back().kind == Kind::kCall && has_cut_call(choice);
  return cut ? "incomplete" : status_of(choice);
}

std::string ResponsesWriter::response(std::string_view status, const std::span<const Choice>* choices,
                                      const ApiError* error) const {
  std::string out =
      fmt::format("{{\"id\":\"{}\",\"object\":\"response\",\"created_at\":{},\"status\":\"{}\"", id_, created_, status);
  append_field(out, "model", model_->name());
  if (error == nullptr) {
    out += ",\"error\":null";
  } else {
    out += R"(,"error":{"code":"server_error")";
    append_field(out, "message", error->message);
    out += '}';
  }
  out += status == "incomplete" ? R"(,"incomplete_details":{"reason":"max_output_tokens"})"
                                : R"(,"incomplete_details":null)";
  out += ",\"temperature\":";
  append_number(out, static_cast<double>(request_->sampling.temperature));
  out += ",\"top_p\":";
  append_number(out, static_cast<double>(request_->sampling.top_p));
  out += ',' + request_->shown + ",\"output\":[";
  for (size_t i = 0; i < items_.size() && choices != nullptr; ++i) {
    if (i > 0) out += ',';
    const bool last = i + 1 == items_.size();
    append_item(out, items_[i], last ? status_of_last(choices->front()) : "completed", false);
  }
  out += "],\"usage\":";
  if (choices == nullptr) return out + "null}";
  const Usage all = sum(*choices);
  fmt::format_to(
      std::back_inserter(out),
      R"({{"input_tokens":{},"input_tokens_details":{{"cached_tokens":{},"cache_write_tokens":0}},)"
      R"("output_tokens":{},"output_tokens_details":{{"reasoning_tokens":{}}},"total_tokens":{},"nestedfp":)",
      all.prompt_tokens, all.cached_tokens, all.completion_tokens, choices->front().reasoning_tokens,
      all.prompt_tokens + all.completion_tokens);
  append_precision(out, all);
  return out + "}}";
}

void ResponsesWriter::begin(std::string& out, Choice&) {
  const std::string made = response("in_progress", nullptr, nullptr);
  for (const char* type : {"response.created", "response.in_progress"}) {
    event(out, type);
    out += ",\"response\":" + made + "}\n\n";
  }
}

void ResponsesWriter::events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) {
  for (const ToolEvent& e : events) {
    switch (e.kind) {
      case ToolEvent::Kind::kReasoning:
      case ToolEvent::Kind::kText: {
        if (e.text.empty()) break;
        const bool text = e.kind == ToolEvent::Kind::kText;
        Item& item = open(out, text ? Kind::kMessage : Kind::kReasoning, nullptr);
        item.text += e.text;
        event(out, text ? "response.output_text.delta" : "response.reasoning_text.delta");
        place(out);
        append_field(out, "delta", e.text);
        if (text) {
          out += ",\"logprobs\":[" + choice.logprobs.content + ']';
          choice.logprobs.move_content(&item.logprobs);
        }
        out += "}\n\n";
        break;
      }
      case ToolEvent::Kind::kCall:
        open(out, Kind::kCall, &choice.calls[static_cast<size_t>(e.call)]);
        break;
      case ToolEvent::Kind::kArguments:
        items_.back().text += e.text;
        event(out, "response.function_call_arguments.delta");
        place(out);
        append_field(out, "delta", e.text);
        out += "}\n\n";
        break;
    }
  }
  if (!final) return;
  if (items_.empty()) open(out, Kind::kMessage, nullptr);  // an answer of nothing is a message of nothing
  close(out, status_of_last(choice));
}

void ResponsesWriter::end(std::string& out, std::span<const Choice> choices) {
  const std::string_view status = status_of(choices.front());
  const std::string made = response(status, &choices, nullptr);
  event(out, status == "incomplete" ? "response.incomplete" : "response.completed");
  out += ",\"response\":" + made + "}\n\n";
  keep(made);
}

void ResponsesWriter::failure(std::string& out, const ApiError& error) {
  event(out, "error");
  append_field(out, "code", error.code.empty() ? "server_error" : error.code);
  append_field(out, "message", error.message);
  out += ",\"param\":null}\n\n";
  event(out, "response.failed");
  out += ",\"response\":" + response("failed", nullptr, &error) + "}\n\n";
}

std::string ResponsesWriter::whole(std::span<const Choice* const> choices, std::span<const Choice> all) {
  const Choice& choice = *choices.front();
  const auto add = [&](Kind kind, const std::string& text) -> Item& {
    Item item;
    item.kind = kind;
    item.id = new_id(kind);
    item.text = text;
    return items_.emplace_back(std::move(item));
  };
  for (const AnswerPart& part : choice.parts) {
    if (part.kind == ToolEvent::Kind::kCall) {
      const ToolCall& call = choice.calls[part.call];
      Item& item = add(Kind::kCall, call.arguments);
      item.call_id = call.id;
      item.name = call.name;
    } else {
      add(part.kind == ToolEvent::Kind::kText ? Kind::kMessage : Kind::kReasoning, part.text).logprobs = part.logprobs;
    }
  }
  if (items_.empty()) add(Kind::kMessage, "");
  std::string made = response(status_of(choice), &all, nullptr);
  keep(made);
  return made;
}

void ResponsesWriter::keep(const std::string& response) const {
  if (!request_->store) return;
  Json message = {{"role", "assistant"}, {"content", ""}};
  std::string text, thoughts;
  for (const Item& item : items_) {
    if (item.kind == Kind::kReasoning) thoughts += item.text;
    if (item.kind == Kind::kMessage) text += item.text;
    if (item.kind != Kind::kCall) continue;
    message["tool_calls"].push_back({{"id", item.call_id},
                                     {"type", "function"},
                                     {"function", {{"name", item.name}, {"arguments", object_or_empty(item.text)}}}});
  }
  message["content"] = std::move(text);
  if (!thoughts.empty()) message["reasoning_content"] = std::move(thoughts);
  std::string conversation = request_->conversation;
  conversation.pop_back();  // ']'
  conversation += ',' + dump(message) + ']';
  store_->put({id_, request_->key, response, std::move(conversation)});
}

}  // namespace nfp::server
