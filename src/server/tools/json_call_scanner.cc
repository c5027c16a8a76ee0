#include "server/tools/json_call_scanner.h"

#include <utility>

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

std::optional<std::string> unquote(std::string_view text) {
  auto value = parse_json(text);
  if (!value.ok() || !value->is_string()) return std::nullopt;
  return value->get<std::string>();
}

}  // namespace

std::string JsonCallScanner::take_arguments() { return std::exchange(arguments_, {}); }

JsonCallScanner::State JsonCallScanner::feed(char c) {
  if (state_ != State::kOpen) return state_;
  raw_ += c;
  switch (where_) {
    case Where::kStart:
      if (is_blank(c)) return state_;
      if (c != '{') return broken();
      where_ = Where::kKeyOrEnd;
      return state_;
    case Where::kKeyOrEnd:
      if (is_blank(c)) return state_;
      if (c == '}') return state_ = State::kDone;
      if (c != '"') return broken();
      token_ = c;
      where_ = Where::kKey;
      end_ = {};
      end_.feed(c);
      return state_;
    case Where::kKey:
      token_ += c;
      if (end_.feed(c)) {
        const auto key = unquote(token_);
        if (!key) return broken();
        const bool arguments = *key == "arguments" || *key == "parameters";
        field_ = *key == "name"                 ? Field::kName
                 : arguments && !saw_arguments_ ? Field::kArguments  // of several the first, which may be sent already
                                                : Field::kOther;
        where_ = Where::kColon;
      }
      return state_;
    case Where::kColon:
      if (is_blank(c)) return state_;
      if (c != ':') return broken();
      where_ = Where::kValue;
      return state_;
    case Where::kValue:
      if (is_blank(c)) return state_;
      if (c == ',' || c == '}' || c == ']' || c == ':') return broken();
      // Names are strings; arguments are objects.
      if (field_ == Field::kName && c != '"') return broken();
      if (field_ == Field::kArguments && c != '{') return broken();
      if (field_ == Field::kArguments) saw_arguments_ = true;
      token_.clear();
      end_ = {};
      scalar_ = c != '"' && c != '{' && c != '[';
      where_ = Where::kInValue;
      [[fallthrough]];
    case Where::kInValue: {
      if (scalar_) {
        if (c == '"' || c == '{' || c == '[') return broken();
        if (c != ',' && c != '}' && !is_blank(c)) return state_;
        where_ = Where::kCommaOrEnd;
        break;  // this byte is already what follows
      }
      if (field_ == Field::kArguments) {
        arguments_ += c;
      } else if (field_ == Field::kName) {
        token_ += c;
      }
      if (end_.feed(c)) {
        if (field_ == Field::kName) {
          name_ = unquote(token_);
          if (!name_ || name_->empty()) return broken();
        }
        where_ = Where::kCommaOrEnd;
      }
      return state_;
    }
    case Where::kCommaOrEnd:
      break;
  }
  if (is_blank(c)) return state_;
  if (c == '}') return state_ = State::kDone;
  if (c != ',') return broken();
  where_ = Where::kKeyOrEnd;
  return state_;
}

}  // namespace nfp::server
