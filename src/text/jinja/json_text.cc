#include "text/jinja/json_text.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "text/jinja/operators.h"
#include "text/jinja/sorting.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

class JsonWriter {
 public:
  JsonWriter(Runtime& rt, const JsonStyle& style) : rt_(rt), style_(style) {}

  void value(const Value& v) {
    const Runtime::Nest nest(rt_);
    rt_.step();
    switch (v.kind()) {
      case Kind::kNone:
        return put("null");
      case Kind::kBool:
        return put(v.as_bool() ? "true" : "false");
      case Kind::kInt:
        return put(repr_int(v.as_int()));
      case Kind::kFloat:
        return put(real(v.as_real()));
      case Kind::kString:
        return string(v.text());
      case Kind::kList:
      case Kind::kTuple:
        return list(v.as_list().items);
      case Kind::kDict:
        return dict(v.as_dict());
      default:
        rt_.fail("Object of type {} is not JSON serializable", type_name(v));
    }
  }

  std::string take() { return std::move(out_); }

 private:
  void put(std::string_view text) {
    rt_.charge(text.size());
    out_ += text;
  }

  static std::string real(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
    return repr_real(d);
  }

  void string(std::string_view text) {
    rt_.charge(text.size() + 2);
    out_ += '"';
    for (size_t pos = 0; pos < text.size();) {
      const uint32_t c = unicode::next(text, pos);
      switch (c) {
        case '"':
          out_ += "\\\"";
          break;
        case '\\':
          out_ += "\\\\";
          break;
        case '\n':
          out_ += "\\n";
          break;
        case '\r':
          out_ += "\\r";
          break;
        case '\t':
          out_ += "\\t";
          break;
        case '\f':
          out_ += "\\f";
          break;
        case '\b':
          out_ += "\\b";
          break;
        default:
          if (c < 0x20 || (style_.ascii && c > 0x7F && c < 0x10000)) {
            escape(c);
          } else if (style_.ascii && c >= 0x10000) {
            escape(0xD800 + ((c - 0x10000) >> 10));
            escape(0xDC00 + ((c - 0x10000) & 0x3FF));
          } else {
            unicode::append(out_, c);
          }
      }
    }
    out_ += '"';
  }

  void escape(uint32_t unit) { fmt::format_to(std::back_inserter(out_), "\\u{:04x}", unit); }

  void new_line() {
    if (!style_.pretty) return;
    put("\n");
    for (int i = 0; i < level_; ++i) put(style_.indent);
  }

  void list(const std::vector<Value>& items) {
    if (items.empty()) return put("[]");
    put("[");
    ++level_;
    bool first = true;
    for (const Value& item : items) {
      if (!first) put(style_.item_separator);
      first = false;
      new_line();
      value(item);
    }
    --level_;
    new_line();
    put("]");
  }

  void key(const Value& k) {
    switch (k.kind()) {
      case Kind::kString:
        return string(k.text());
      case Kind::kNone:
        return string("null");
      case Kind::kBool:
        return string(k.as_bool() ? "true" : "false");
      case Kind::kInt:
        return string(repr_int(k.as_int()));
      case Kind::kFloat:
        return string(real(k.as_real()));
      default:
        rt_.fail("keys must be str, int, float, bool or None, not {}", type_name(k));
    }
  }

  void dict(const Dict& d) {
    if (d.entries.empty()) return put("{}");
    std::vector<const Dict::Entry*> entries;
    rt_.charge(d.entries.size() * sizeof(void*));
    for (const Dict::Entry& entry : d.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      stable_merge_sort(entries, [this](const Dict::Entry* a, const Dict::Entry* b) {
        rt_.step();
        return less(rt_, a->key, b->key);
      });
    }
    put("{");
    ++level_;
    bool first = true;
    for (const Dict::Entry* entry : entries) {
      if (!first) put(style_.item_separator);
      first = false;
      new_line();
      key(entry->key);
      put(style_.key_separator);
      value(entry->value);
    }
    --level_;
    new_line();
    put("}");
  }

  Runtime& rt_;
  const JsonStyle& style_;
  std::string out_;
  int level_ = 0;
};

}  // namespace

std::string to_json(Runtime& rt, const Value& v, const JsonStyle& style) {
  JsonWriter writer(rt, style);
  writer.value(v);
  return writer.take();
}

}  // namespace nfp::jinja
