// Follows one JSON object {"name": "f", "arguments": {...}} byte by byte as a model writes it, so that a call's name
// and the text of its arguments can be passed on while they come.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/tools/parser_parts.h"

namespace nfp::server {

class JsonCallScanner {
 public:
  enum class State { kOpen, kDone, kBroken };

  // Takes one byte. kDone: this byte closed the object. kBroken: no JSON object of this shape; `raw` holds all bytes.
  State feed(char c);

  const std::optional<std::string>& name() const { return name_; }
  // Bytes of the value of "arguments" or "parameters" that have come since the last call.
  std::string take_arguments();
  bool has_arguments() const { return saw_arguments_; }
  const std::string& raw() const { return raw_; }

 private:
  enum class Where { kStart, kKeyOrEnd, kKey, kColon, kValue, kInValue, kCommaOrEnd };
  enum class Field { kOther, kName, kArguments };

  State broken() { return state_ = State::kBroken; }

  State state_ = State::kOpen;
  Where where_ = Where::kStart;
  Field field_ = Field::kOther;
  std::string raw_;
  std::string token_;  // the key or value being read, as written
  std::string arguments_;
  std::optional<std::string> name_;
  bool saw_arguments_ = false;
  bool scalar_ = false;  // a number or literal, which ends at the next separator
  JsonValueEnd end_;     // of the key or value, if it is no scalar
};

}  // namespace nfp::server
