#include "server/tools/tool_call_parser.h"

#include <algorithm>
#include <random>
#include <utility>

#include "server/tools/harmony_parser.h"
#include "server/tools/json_call_scanner.h"
#include "server/tools/parser_parts.h"
#include "server/tools/region_parser.h"

namespace nfp::server {
namespace {

// What a call begins with.
constexpr std::string_view kToolCallMark = "<tool_call>";  // Hermes, Qwen3-Coder
constexpr std::string_view kMistralMark = "[TOOL_CALLS]";
constexpr std::string_view kPhi4Mark = "<|tool_call|>";
constexpr std::string_view kGemmaMark = "<start_function_call>";

// Common ground: an object being read, and the calls so far.
class CallReader {
 public:
  // `bare`: a name alone is a call, without arguments.
  explicit CallReader(bool bare = true) : bare_(bare) {}
  JsonCallScanner::State feed(char c, std::vector<ToolEvent>* events) {
    const auto state = scanner_.feed(c);
    emit(state, events);
    return state;
  }
  // Whether a part of the current object has been passed on, so that it cannot become text any more.
  bool committed() const { return announced_; }
  bool named() const { return scanner_.name().has_value(); }
  const std::string& raw() const { return scanner_.raw(); }
  void next() {
    scanner_ = JsonCallScanner();
    announced_ = false;
  }
  void announce(std::string name, std::vector<ToolEvent>* events) {
    announced_ = true;
    events->push_back({ToolEvent::Kind::kCall, std::move(name), ++call_});
  }
  void arguments(std::string text, std::vector<ToolEvent>* events) {
    add_piece({ToolEvent::Kind::kArguments, std::move(text), call_}, events);
  }

 private:
  void emit(JsonCallScanner::State state, std::vector<ToolEvent>* events) {
    if (!scanner_.name()) return;
    // A name alone may still be another object than a call: wait for the arguments, or the end.
    if (!announced_ && (scanner_.has_arguments() || (bare_ && state == JsonCallScanner::State::kDone))) {
      announce(*scanner_.name(), events);
      if (!scanner_.has_arguments()) arguments("{}", events);
    }
    if (announced_) arguments(scanner_.take_arguments(), events);
  }

  JsonCallScanner scanner_;
  bool bare_;
  bool announced_ = false;
  int call_ = -1;
};

class HermesParser final : public ToolCallParser {
 public:
  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    ended_ = false;
    for (const char c : text) take(c, events);
    if (where_ == Where::kText) release(begun_mark(held_, kToolCallMark), events);
  }

  void finish(std::vector<ToolEvent>* events, bool cut) override {
    if (where_ == Where::kCall && !reader_.committed() && !cut) not_a_call(reader_.raw().size());
    // The model forgot to close: what it wrote behind the call is text.
    if (where_ == Where::kAfter) held_.resize(held_.size() - begun_mark(held_, kClose));
    const bool blank = std::all_of(held_.begin(), held_.end(), is_blank);
    if (where_ != Where::kCall && !(called_ && blank)) add_text(space_ + held_, events);
    held_.clear();
  }

  bool within_text() const override { return where_ == Where::kCall ? !reader_.committed() : !ended_; }

 private:
  static constexpr std::string_view kClose = "</tool_call>";
  enum class Where { kText, kCall, kAfter };

  // White space around calls is part of the answer only where text follows.
  void emit(std::string_view text, std::vector<ToolEvent>* events) {
    if (text.empty()) return;
    add_text(std::exchange(space_, {}).append(text), events);
    called_ = false;
  }

  // What the object began behind and its first `bytes` bytes are no call.
  void not_a_call(size_t bytes) {
    held_ = opening_ + reader_.raw().substr(0, bytes);
    where_ = opening_ == kToolCallMark ? Where::kText : Where::kAfter;
    apart_ = false;
  }

  void begin_call(std::string opening) {
    opening_ = std::move(opening);
    where_ = Where::kCall;
    reader_.next();
  }

  // Passes on all held text but its last `keep` bytes, and but the white space before them.
  void release(size_t keep, std::vector<ToolEvent>* events) {
    const size_t all = held_.size() - keep;
    size_t end = all;
    while (end > 0 && is_blank(held_[end - 1])) --end;
    emit(std::string_view(held_).substr(0, end), events);
    space_.append(held_, end, all - end);
    held_.erase(0, all);
  }

  void take(char c, std::vector<ToolEvent>* events) {
    ended_ = ended_ && is_blank(c);
    if (where_ == Where::kCall) {
      const auto state = reader_.feed(c, events);
      if (state == JsonCallScanner::State::kOpen) return;
      const bool done = state == JsonCallScanner::State::kDone;
      // The byte that breaks an object is no part of it: it may begin a mark.
      if (reader_.committed()) {
        called_ = apart_ = true;
        where_ = Where::kAfter;
      } else {
        not_a_call(reader_.raw().size() - (done ? 0 : 1));
      }
      ended_ = done && called_;
      if (done) return;
    }
    if (where_ == Where::kAfter && apart_ && c == '{') {  // some models write several calls between one pair of marks
      begin_call(std::exchange(held_, {}));
      reader_.feed(c, events);
      return;
    }
    apart_ = apart_ && (is_blank(c) || c == ',');
    held_ += c;
    if (c != '>') return;
    if (held_.ends_with(kToolCallMark)) {
      held_.resize(held_.size() - kToolCallMark.size());
      release(0, events);
      begin_call(std::string(kToolCallMark));
    } else if (where_ == Where::kAfter && held_.ends_with(kClose)) {
      held_.clear();
      where_ = Where::kText;
      ended_ = true;
    }
  }

  Where where_ = Where::kText;
  bool ended_ = false;   // a call or its closing mark, with what was fed last
  std::string held_;     // text, or what stands between a call and its closing mark
  std::string opening_;  // what the object being read began behind: the mark, or what separates it from a call
  std::string space_;    // since the last text
  bool called_ = false;  // since the last text
  bool apart_ = false;   // nothing but what separates calls has come since the last one
  CallReader reader_;
};

class Llama3JsonParser final : public ToolCallParser {
 public:
  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    for (const char c : text) take(c, events);
  }
  void finish(std::vector<ToolEvent>* events, bool cut) override {
    if (where_ == Where::kStart) add_text(held_, events);
    // Without a name it may be any JSON object that the model answers with.
    if (where_ == Where::kCall && !reader_.committed() && !(cut && reader_.named())) {
      add_text(held_ + reader_.raw(), events);
    }
  }
  bool within_text() const override {
    return where_ == Where::kCall ? !reader_.committed() : where_ != Where::kBetween;
  }

 private:
  static constexpr std::string_view kTag = "<|python_tag|>";
  enum class Where { kStart, kCall, kBetween, kText };

  void take(char c, std::vector<ToolEvent>* events) {
    switch (where_) {
      case Where::kStart: {
        held_ += c;
        if (is_blank(c) && begun_ + 1 == held_.size()) {
          ++begun_;
          return;
        }
        const std::string_view rest = std::string_view(held_).substr(begun_);
        if (!tagged_ && kTag.starts_with(rest)) {
          tagged_ = rest == kTag;
          if (tagged_) begun_ = held_.size();
          return;
        }
        if (rest != "{") {
          where_ = Where::kText;
          add_text(std::exchange(held_, {}), events);
          return;
        }
        held_.pop_back();
        where_ = Where::kCall;
        feed_call(c, events);
        return;
      }
      case Where::kCall:
        feed_call(c, events);
        return;
      case Where::kBetween:
        if (c == '{') {
          reader_.next();
          held_.clear();
          where_ = Where::kCall;
          feed_call(c, events);
        } else if (!is_blank(c) && c != ';' && c != ',') {
          where_ = Where::kText;
          add_text(std::string(1, c), events);
        }
        return;
      case Where::kText:
        add_text(std::string(1, c), events);
        return;
    }
  }

  void feed_call(char c, std::vector<ToolEvent>* events) {
    const auto state = reader_.feed(c, events);
    if (state == JsonCallScanner::State::kOpen) return;
    if (!reader_.committed()) add_text(held_ + reader_.raw(), events);
    where_ = reader_.committed() ? Where::kBetween : Where::kText;
    held_.clear();
    // The byte that breaks a call is what follows it.
    if (reader_.committed() && state != JsonCallScanner::State::kDone) take(c, events);
  }

  Where where_ = Where::kStart;
  std::string held_;
  size_t begun_ = 0;  // of what is held: white space, and the tag
  bool tagged_ = false;
  CallReader reader_{/*bare=*/false};  // any answer in JSON may have a name
};

class MistralParser final : public ToolCallParser {
 public:
  // `forced`: the answer starts inside the list.
  explicit MistralParser(bool forced = false)
      : where_(forced ? Where::kOpening : Where::kText), opening_(forced ? "" : kMistralMark) {}

  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    ended_ = false;
    for (const char c : text) take(c, events);
    if (where_ == Where::kText) release(begun_mark(held_, kMistralMark), events);
  }
  void finish(std::vector<ToolEvent>* events, bool cut) override {
    if (where_ == Where::kText) release(0, events);
    if (cut) return;
    if (where_ == Where::kName) not_a_call(held_, events);
    if (where_ == Where::kObject && !reader_.committed()) not_a_call(reader_.raw(), events);
    // Behind calls it is what separates them.
    if (where_ == Where::kOpening || (where_ == Where::kBetween && !called_)) not_a_call("", events);
  }
  bool within_text() const override {
    if (where_ == Where::kNamedArguments) return false;
    return where_ == Where::kObject ? !reader_.committed() : !ended_;
  }

 private:
  enum class Where { kText, kOpening, kName, kNamedArguments, kObject, kBetween };

  void release(size_t keep, std::vector<ToolEvent>* events) {
    add_text(held_.substr(0, held_.size() - keep), events);
    held_.erase(0, held_.size() - keep);
  }

  void take(char c, std::vector<ToolEvent>* events) {
    ended_ = false;
    switch (where_) {
      case Where::kText:
        held_ += c;
        if (c == ']' && held_.ends_with(kMistralMark)) {
          release(kMistralMark.size(), events);
          opening_ = std::exchange(held_, {});
          between_.clear();
          called_ = false;
          where_ = Where::kOpening;
        }
        return;
      case Where::kOpening:
        if (is_blank(c)) {
          opening_ += c;
        } else if (c == '[') {
          opening_ += c;
          where_ = Where::kBetween;
        } else if (c == '{') {
          start_object(c, events);
        } else {
          held_ = c;
          where_ = Where::kName;
        }
        return;
      case Where::kName:
        held_ += c;
        if (c == '{') {
          std::string name = held_.substr(0, held_.size() - 1);
          if (const size_t mark = name.find('['); mark != std::string::npos) name.resize(mark);  // [CALL_ID]..., [ARGS]
          while (!name.empty() && is_blank(name.back())) name.pop_back();
          held_.clear();
          reader_.next();
          reader_.announce(std::move(name), events);
          end_ = {};
          where_ = Where::kNamedArguments;
          named_argument(c, events);
        }
        return;
      case Where::kNamedArguments:
        named_argument(c, events);
        return;
      case Where::kObject: {
        const auto state = reader_.feed(c, events);
        if (state == JsonCallScanner::State::kOpen) return;
        where_ = reader_.committed() ? Where::kBetween : Where::kText;
        if (!reader_.committed()) return not_a_call(reader_.raw(), events);
        called_ = ended_ = true;
        between_.clear();
        if (state != JsonCallScanner::State::kDone) take(c, events);  // the byte that breaks a call is what follows it
        return;
      }
      case Where::kBetween:
        if (c == '{') {
          start_object(c, events);
        } else if (c == ']') {
          where_ = Where::kText;
          ended_ = true;
        } else if (is_blank(c) || c == ',') {
          between_ += c;
        } else {  // the model forgot to close the list
          where_ = Where::kText;
          not_a_call("", events);
          take(c, events);
        }
        return;
    }
  }

  // Text from the mark on, or from the last call.
  void not_a_call(std::string_view text, std::vector<ToolEvent>* events) {
    add_text((called_ ? std::string() : opening_) + between_ + std::string(text), events);
  }

  void start_object(char c, std::vector<ToolEvent>* events) {
    reader_.next();
    where_ = Where::kObject;
    reader_.feed(c, events);
  }

  void named_argument(char c, std::vector<ToolEvent>* events) {
    reader_.arguments(std::string(1, c), events);
    if (!end_.feed(c)) return;
    where_ = Where::kText;
    ended_ = true;
  }

  Where where_;
  bool ended_ = false;  // a call or their list, with what was fed last
  std::string held_;
  std::string opening_;  // the mark, and what came behind it before an object or a name
  std::string between_;  // of a list, since the last call
  bool called_ = false;  // since the mark
  CallReader reader_;
  JsonValueEnd end_;  // of the arguments behind a name
};

class NamedCallParser final : public ToolCallParser {
 public:
  explicit NamedCallParser(std::string function) { reader_.announce(std::move(function), &first_); }
  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    start(events);
    reader_.arguments(std::string(text), events);
  }
  void finish(std::vector<ToolEvent>* events, bool cut) override {
    (void)cut;
    start(events);
  }
  bool within_text() const override { return false; }

 private:
  void start(std::vector<ToolEvent>* events) {
    for (ToolEvent& event : first_) events->push_back(std::move(event));
    first_.clear();
  }
  std::vector<ToolEvent> first_;
  CallReader reader_;
};

}  // namespace

Result<ToolFormat> parse_tool_format(std::string_view name, std::string_view chat_template) {
  constexpr std::pair<std::string_view, ToolFormat> kNames[] = {
      {"none", ToolFormat::kNone},
      {"hermes", ToolFormat::kHermes},
      {"llama3_json", ToolFormat::kLlama3Json},
      {"mistral", ToolFormat::kMistral},
      {"qwen3_coder", ToolFormat::kQwen3Coder},
      {"pythonic", ToolFormat::kPythonic},
      {"llama4_pythonic", ToolFormat::kPythonic},
      {"phi4_mini_json", ToolFormat::kPhi4},
      {"gemma", ToolFormat::kGemma},
      {"gpt_oss", ToolFormat::kHarmony},
      {"openai", ToolFormat::kHarmony},
  };
  for (const auto& [known, format] : kNames) {
    if (name == known) return format;
  }
  if (name != "auto") {
    return error(ErrorCode::kUsage,
                 "--tool-call-parser is '{}'; expected auto, hermes, llama3_json, mistral, qwen3_coder, pythonic, "
                 "phi4_mini_json, gemma, gpt_oss or none",
                 name);
  }
  const auto says = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (says("<|channel|>")) return ToolFormat::kHarmony;
  if (says(kGemmaMark)) return ToolFormat::kGemma;
  if (!says("tools")) return ToolFormat::kHermes;
  if (says(kMistralMark)) return ToolFormat::kMistral;
  if (says("<function=")) return ToolFormat::kQwen3Coder;
  if (says(kToolCallMark)) return ToolFormat::kHermes;
  if (says("<|python_start|>")) return ToolFormat::kPythonic;
  if (says("<|tool|>") || says(kPhi4Mark) || says("functools")) return ToolFormat::kPhi4;
  if (says("<|python_tag|>") || says("\"parameters\"")) return ToolFormat::kLlama3Json;
  return ToolFormat::kNone;
}

std::unique_ptr<ToolCallParser> make_tool_call_parser(ToolFormat format, const Json* tools) {
  switch (format) {
    case ToolFormat::kHermes:
      return std::make_unique<HermesParser>();
    case ToolFormat::kLlama3Json:
      return std::make_unique<Llama3JsonParser>();
    case ToolFormat::kMistral:
      return std::make_unique<MistralParser>();
    case ToolFormat::kQwen3Coder: {
      const auto read = [tools](std::string_view text) { return read_xml_calls(text, tools); };
      // After some words it often leaves out the first mark, hardly ever the last.
      return make_region_parser({{std::string(kToolCallMark), "</tool_call>", read},
                                 {"<function=", "</tool_call>", read, /*from_start=*/false, /*keeps_open=*/true}});
    }
    case ToolFormat::kPythonic:
      // Llama 4 writes JSON instead now and then, between the same marks or as the whole answer.
      return make_region_parser({{"<|python_start|>", "<|python_end|>", read_unmarked_calls},
                                 {"[", "", read_unmarked_calls, /*from_start=*/true, /*keeps_open=*/true},
                                 {"{", "", read_unmarked_calls, /*from_start=*/true, /*keeps_open=*/true}});
    case ToolFormat::kPhi4: {
      const auto read = [](std::string_view text) { return read_json_calls("[" + std::string(text)); };
      return make_region_parser({{std::string(kPhi4Mark), "<|/tool_call|>", read_json_calls},
                                 {.open = "functools[", .close = "", .read = read, .list = true}});
    }
    case ToolFormat::kGemma:
      // Gemma 3 has no form of its own: these are the ones that its documentation has prompts for.
      return make_region_parser(
          {{std::string(kGemmaMark), "<end_function_call>", read_gemma_calls},
           {"```tool_code\n", "```", read_python_calls},
           {"```json\n", "```", read_unmarked_calls, /*from_start=*/true, /*keeps_open=*/false, /*may_be_text=*/true},
           {"[", "", read_unmarked_calls, /*from_start=*/true, /*keeps_open=*/true},
           {"{", "", read_unmarked_calls, /*from_start=*/true, /*keeps_open=*/true}});
    case ToolFormat::kHarmony:
      return make_harmony_parser();
    case ToolFormat::kNone:
      break;
  }
  return nullptr;
}

std::unique_ptr<ToolCallParser> make_forced_call_parser(std::string function) {
  if (function.empty()) return std::make_unique<MistralParser>(/*forced=*/true);
  return std::make_unique<NamedCallParser>(std::move(function));
}

std::string_view opening_mark(ToolFormat format) {
  switch (format) {
    case ToolFormat::kHermes:
    case ToolFormat::kQwen3Coder:
      return kToolCallMark;
    case ToolFormat::kMistral:
      return kMistralMark;
    case ToolFormat::kPhi4:
      return kPhi4Mark;
    case ToolFormat::kGemma:
      return kGemmaMark;
    case ToolFormat::kNone:
    case ToolFormat::kLlama3Json:
    case ToolFormat::kPythonic:
    case ToolFormat::kHarmony:
      break;
  }
  return {};
}

std::string make_tool_call_id(ToolFormat format) {
  thread_local std::mt19937_64 source(std::random_device{}());
  constexpr std::string_view kAlphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  std::string id = format == ToolFormat::kMistral ? "" : "call_";
  const size_t length = format == ToolFormat::kMistral ? 9 : 24;
  std::uniform_int_distribution<size_t> pick(0, kAlphabet.size() - 1);
  for (size_t i = 0; i < length; ++i) id += kAlphabet[pick(source)];
  return id;
}

}  // namespace nfp::server
