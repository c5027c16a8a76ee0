#include "server/tools/reasoning_parser.h"

#include <utility>

#include "server/tools/parser_parts.h"

namespace nfp::server {
namespace {

class ReasoningParser final : public ToolCallParser {
 public:
  ReasoningParser(ReasoningMarks marks, bool inside, std::unique_ptr<ToolCallParser> answer)
      : marks_(marks), answer_(std::move(answer)), where_(inside ? Where::kThoughts : Where::kStart) {}

  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    while (!text.empty() && where_ != Where::kAnswer) {
      take(text.front(), events);
      text.remove_prefix(1);
    }
    const bool repeats = !thought_ && marks_.open.starts_with(held_);  // perhaps the opening mark a second time
    if (where_ == Where::kThoughts && !repeats) {
      // White space before the end of the thoughts is none of them.
      const size_t all = held_.size() - begun_mark(held_, marks_.close);
      size_t end = all;
      while (end > 0 && is_blank(held_[end - 1])) --end;
      think(end, events);
      space_.append(held_, 0, all - end);
      held_.erase(0, all - end);
    }
    if (!text.empty()) pass_on(text, events);
  }

  void finish(std::vector<ToolEvent>* events, bool cut) override {
    if (where_ == Where::kThoughts) {
      held_.insert(0, std::exchange(space_, {}));
      think(held_.size(), events);
    }
    if (where_ == Where::kStart) pass_on(held_, events);
    if (answer_) answer_->finish(events, cut);
  }

  bool within_text() const override {
    if (where_ == Where::kAnswer) return !answer_ || answer_->within_text();
    return where_ == Where::kStart;
  }

 private:
  enum class Where { kStart, kThoughts, kAfter, kAnswer };

  void take(char c, std::vector<ToolEvent>* events) {
    switch (where_) {
      case Where::kStart: {
        held_ += c;
        if (is_blank(c) && begun_ + 1 == held_.size()) {
          ++begun_;
          return;
        }
        const std::string_view begun = std::string_view(held_).substr(begun_);
        if (begun == marks_.open) {
          where_ = Where::kThoughts;
          held_.clear();
        } else if (!marks_.open.starts_with(begun)) {
          where_ = Where::kAnswer;
          pass_on(std::exchange(held_, {}), events);
        }
        return;
      }
      case Where::kThoughts:
        if (held_.empty() && !thought_ && is_blank(c)) return;  // before the first word
        held_ += c;
        if (c == marks_.close.back() && held_.ends_with(marks_.close)) {
          size_t end = held_.size() - marks_.close.size();
          while (end > 0 && is_blank(held_[end - 1])) --end;
          think(end, events);
          held_.clear();
          space_.clear();
          where_ = Where::kAfter;
        } else if (!thought_ && held_ == marks_.open) {  // the prompt had the mark, and the model repeats it
          held_.clear();
        }
        return;
      case Where::kAfter:
        if (is_blank(c)) return;
        where_ = Where::kAnswer;
        pass_on(std::string_view(&c, 1), events);
        return;
      case Where::kAnswer:
        return;
    }
  }

  void think(size_t count, std::vector<ToolEvent>* events) {
    if (count == 0) return;
    thought_ = true;
    events->push_back({ToolEvent::Kind::kReasoning, std::exchange(space_, {}).append(held_, 0, count), 0});
    held_.erase(0, count);
  }

  void pass_on(std::string_view text, std::vector<ToolEvent>* events) {
    if (text.empty()) return;
    if (answer_) return answer_->feed(text, events);
    add_text(std::string(text), events);
  }

  const ReasoningMarks marks_;
  std::unique_ptr<ToolCallParser> answer_;
  Where where_;
  std::string held_;
  size_t begun_ = 0;   // white space before the answer
  std::string space_;  // since the last word of the thoughts
  bool thought_ = false;
};

}  // namespace

Result<ReasoningFormat> parse_reasoning_format(std::string_view name, std::string_view chat_template) {
  if (name == "none") return ReasoningFormat::kNone;
  if (name == "think" || name == "deepseek_r1" || name == "qwen3") return ReasoningFormat::kThink;
  if (name == "mistral") return ReasoningFormat::kMistral;
  if (name == "seed_oss") return ReasoningFormat::kSeed;
  if (name == "gpt_oss" || name == "openai_gptoss") return ReasoningFormat::kHarmony;
  if (name != "auto") {
    return error(
        ErrorCode::kUsage,
        "--reasoning-parser is '{}'; expected auto, think, deepseek_r1, qwen3, mistral, seed_oss, gpt_oss or none",
        name);
  }
  const auto says = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (says("<|channel|>")) return ReasoningFormat::kHarmony;
  if (says("<think>") || says("</think>")) return ReasoningFormat::kThink;
  if (says("[THINK]")) return ReasoningFormat::kMistral;
  if (says("<seed:think>")) return ReasoningFormat::kSeed;
  return ReasoningFormat::kNone;
}

ReasoningMarks marks_of(ReasoningFormat format) {
  switch (format) {
    case ReasoningFormat::kThink:
      return {"<think>", "</think>"};
    case ReasoningFormat::kMistral:
      return {"[THINK]", "[/THINK]"};
    case ReasoningFormat::kSeed:
      return {"<seed:think>", "</seed:think>"};
    case ReasoningFormat::kNone:
    case ReasoningFormat::kHarmony:
      break;
  }
  return {};
}

std::unique_ptr<ToolCallParser> make_reasoning_parser(ReasoningFormat format, bool inside,
                                                      std::unique_ptr<ToolCallParser> answer) {
  const ReasoningMarks marks = marks_of(format);
  if (marks.open.empty()) return answer;
  return std::make_unique<ReasoningParser>(marks, inside, std::move(answer));
}

}  // namespace nfp::server
