// What markupsafe's escape does to a text.
#pragma once

#include <string>
#include <string_view>

#include "text/jinja/runtime.h"

namespace nfp::jinja {

// & < > ' " as entities.
inline std::string escape_html(Runtime& rt, std::string_view text) {
  rt.charge(text.size());
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace nfp::jinja
