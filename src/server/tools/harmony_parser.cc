#include "server/tools/harmony_parser.h"

#include <algorithm>

#include "server/tools/parser_parts.h"

namespace nfp::server {
namespace {

constexpr std::string_view kMessage = "<|message|>";
constexpr std::string_view kEnds[] = {"<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"};
// The prompt ends with "<|start|>assistant", so that a header may begin in its middle: with the channel, or with whom
// the message is for.
constexpr std::string_view kStarts[] = {"<|channel|>", "<|start|>", " to=functions."};
constexpr size_t kMaxHeader = 1024;

class HarmonyParser final : public ToolCallParser {
 public:
  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    body_begins_ = false;
    for (const char c : text) take(c, events);
    body_begins_ = body_begins_ && held_.empty();
    if (where_ == Where::kBody) release(partial(), events);
  }

  void finish(std::vector<ToolEvent>* events, bool cut) override {
    if (where_ == Where::kBody) {
      release(0, events);
      if (!cut) end_body(events);  // the model's end may be the mark itself, which is no text
    }
    const bool no_header = where_ == Where::kHeader && !cut && held_.starts_with(kStarts[2]);
    if (where_ == Where::kStart || no_header) emit(ToolEvent::Kind::kText, held_, events);
    held_.clear();
  }

  bool within_text() const override {
    return where_ == Where::kStart || (where_ == Where::kBody && kind_ == ToolEvent::Kind::kText && !body_begins_);
  }

 private:
  enum class Where { kStart, kHeader, kBody };

  void take(char c, std::vector<ToolEvent>* events) {
    held_ += c;
    switch (where_) {
      case Where::kStart: {
        const auto begins = [&](std::string_view start) { return start.starts_with(held_); };
        if (std::find(std::begin(kStarts), std::end(kStarts), held_) != std::end(kStarts)) {
          where_ = Where::kHeader;
        } else if (std::none_of(std::begin(kStarts), std::end(kStarts), begins)) {
          where_ = Where::kBody;
          kind_ = ToolEvent::Kind::kText;
        }
        return;
      }
      case Where::kHeader:
        if (c == '>' && held_.ends_with(kMessage)) {
          begin_body(held_.substr(0, held_.size() - kMessage.size()), events);
          held_.clear();
          where_ = Where::kBody;
          body_begins_ = true;
        } else if (held_.size() > kMaxHeader) {  // no header at all
          where_ = Where::kBody;
          kind_ = ToolEvent::Kind::kText;
        }
        return;
      case Where::kBody:
        if (c != '>') return;
        for (const std::string_view end : kEnds) {
          if (!held_.ends_with(end)) continue;
          held_.resize(held_.size() - end.size());
          release(0, events);
          end_body(events);
          where_ = Where::kHeader;
          return;
        }
    }
  }

  void begin_body(const std::string& header, std::vector<ToolEvent>* events) {
    constexpr std::string_view kTo = "to=functions.";
    const size_t to = header.find(kTo);
    if (to != std::string::npos) {
      const size_t begin = to + kTo.size();
      const size_t end = header.find_first_of(" \n\t<", begin);
      events->push_back({ToolEvent::Kind::kCall, header.substr(begin, end - begin), ++call_});
      kind_ = ToolEvent::Kind::kArguments;
      any_arguments_ = false;
    } else if (header.find("analysis") != std::string::npos) {
      kind_ = ToolEvent::Kind::kReasoning;
    } else {
      kind_ = ToolEvent::Kind::kText;  // final, or a preamble to calls
    }
  }

  void end_body(std::vector<ToolEvent>* events) {
    if (kind_ == ToolEvent::Kind::kArguments && !any_arguments_) emit(kind_, "{}", events);
  }

  size_t partial() const {
    size_t longest = 0;
    for (const std::string_view end : kEnds) longest = std::max(longest, begun_mark(held_, end));
    return longest;
  }

  void release(size_t keep, std::vector<ToolEvent>* events) {
    emit(kind_, held_.substr(0, held_.size() - keep), events);
    held_.erase(0, held_.size() - keep);
  }

  void emit(ToolEvent::Kind kind, std::string text, std::vector<ToolEvent>* events) {
    if (text.empty()) return;
    const bool arguments = kind == ToolEvent::Kind::kArguments;
    any_arguments_ = any_arguments_ || arguments;
    add_piece({kind, std::move(text), arguments ? call_ : 0}, events);
  }

  Where where_ = Where::kStart;
  ToolEvent::Kind kind_ = ToolEvent::Kind::kText;
  std::string held_;
  bool any_arguments_ = false;
  bool body_begins_ = false;  // with what is fed next
  int call_ = -1;
};

}  // namespace

std::unique_ptr<ToolCallParser> make_harmony_parser() { return std::make_unique<HarmonyParser>(); }

}  // namespace nfp::server
