// What the parsers of this folder share.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/tools/tool_call_parser.h"

namespace nfp::server {

inline constexpr std::string_view kBlanks = " \n\t\r";  // JSON's white space

inline bool is_blank(char c) { return kBlanks.find(c) != std::string_view::npos; }

// Length of the longest end of `text` that begins `mark` without being all of it.
size_t begun_mark(std::string_view text, std::string_view mark);

// Adds a piece of text, thoughts or arguments; nothing where it is empty. Pieces that come together are one event.
void add_piece(ToolEvent piece, std::vector<ToolEvent>* events);

inline void add_text(std::string text, std::vector<ToolEvent>* events) {
  add_piece({ToolEvent::Kind::kText, std::move(text), 0}, events);
}

// Finds the last byte of a JSON string, list or object while it comes.
class JsonValueEnd {
 public:
  // Takes one byte, the value's first one first; true where it is its last.
  bool feed(char c);

 private:
  int depth_ = 0;
  bool quoted_ = false;
  bool escaped_ = false;
};

}  // namespace nfp::server
