#include "server/tools/parser_parts.h"

#include <algorithm>
#include <utility>

namespace nfp::server {

size_t begun_mark(std::string_view text, std::string_view mark) {
  for (size_t length = std::min(text.size(), mark.size() - 1); length > 0; --length) {
    if (mark.starts_with(text.substr(text.size() - length))) return length;
  }
  return 0;
}

void add_piece(ToolEvent piece, std::vector<ToolEvent>* events) {
  if (piece.text.empty()) return;
  if (!events->empty() && events->back().kind == piece.kind && events->back().call == piece.call) {
    events->back().text += piece.text;
  } else {
    events->push_back(std::move(piece));
  }
}

bool JsonValueEnd::feed(char c) {
  if (quoted_) {
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      quoted_ = false;
      return depth_ == 0;
    }
    return false;
  }
  if (c == '"') {
    quoted_ = true;
  } else if (c == '{' || c == '[') {
    ++depth_;
  } else if (c == '}' || c == ']') {
    return --depth_ == 0;
  }
  return false;
}

}  // namespace nfp::server
