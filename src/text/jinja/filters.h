// jinja2's filters and tests by name, with transformers' tojson.
#pragma once

#include <string_view>

#include "text/jinja/callables.h"
#include "text/jinja/runtime.h"

namespace nfp::jinja {

using FilterFunction = Value (*)(Runtime& rt, const Value& value, const Args& args);
using TestFunction = bool (*)(Runtime& rt, const Value& value, const Args& args);

FilterFunction find_filter(std::string_view name);  // nullptr: no such filter
TestFunction find_test(std::string_view name);

// Parts of the table of filters (text_filters.cc, sequence_filters.cc, order_filters.cc).
FilterFunction find_text_filter(std::string_view name);
FilterFunction find_sequence_filter(std::string_view name);
FilterFunction find_order_filter(std::string_view name);

}  // namespace nfp::jinja
