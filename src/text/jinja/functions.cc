// How arguments meet parameters, and jinja2's globals with transformers' own.
#include <algorithm>
#include <ctime>

#include "text/jinja/callables.h"
#include "text/jinja/operators.h"

namespace nfp::jinja {
namespace {

// jinja2's sandbox refuses larger ranges (jinja2.sandbox.MAX_RANGE).
constexpr Int kMaxRange = 100'000;
constexpr size_t kMaxDateFormat = 1024;  // bytes

struct FunctionName {
  std::string_view name;
  Function function;
};
constexpr FunctionName kFunctions[] = {{"range", Function::kRange},
                                       {"dict", Function::kDict},
                                       {"namespace", Function::kNamespace},
                                       {"cycler", Function::kCycler},
                                       {"joiner", Function::kJoiner},
                                       {"raise_exception", Function::kRaiseException},
                                       {"strftime_now", Function::kStrftimeNow}};

Value make_range(Runtime& rt, const Args& args) {
  expect_positional(rt, "range", args, 1, 3);
  auto* range = rt.make<Range>();
  const auto& p = args.positional;
  range->start = p.size() > 1 ? int_argument(rt, p[0], "range() argument") : 0;
  range->stop = int_argument(rt, p.size() > 1 ? p[1] : p[0], "range() argument");
  range->step = p.size() > 2 ? int_argument(rt, p[2], "range() argument") : 1;
  if (range->step == 0) rt.fail("range() arg 3 must not be zero");
  if (range->size() > kMaxRange) {
    rt.fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", repr_int(kMaxRange));
  }
  return Value::object(Kind::kRange, range);
}

// dict(mapping or pairs, **named), also of namespace().
void fill_dict(Runtime& rt, std::string_view function, const Args& args, Dict& out) {
  if (args.positional.size() > 1) {
    rt.fail("{} expected at most 1 argument, got {}", function, args.positional.size());
  }
  if (!args.positional.empty()) {
    const Value& from = args.positional[0];
    if (from.is(Kind::kDict)) {
      for (const Dict::Entry& entry : from.as_dict().entries) rt.set(out, entry.key, entry.value);
    } else {
      Iterator* pairs = iterate(rt, from);
      for (Value pair; pairs->next(rt, &pair);) {
        const std::vector<Value> both = items_of(rt, pair);
        if (both.size() != 2) rt.fail("dictionary update sequence element has length {}; 2 is required", both.size());
        rt.set(out, both[0], both[1]);
      }
    }
  }
  for (const auto& [name, value] : args.named) rt.set(out, rt.string(std::string(name)), value);
}

// datetime.now().strftime(format): local time without a zone, so %z and %Z print nothing.
Value strftime_now(Runtime& rt, const Args& args) {
  expect_positional(rt, "strftime_now", args, 1, 1);
  if (!args.positional[0].is(Kind::kString)) rt.fail("strftime_now() argument must be str");
  const std::string_view format = args.positional[0].text();
  if (format.size() > kMaxDateFormat) rt.fail("strftime_now() format is longer than {} bytes", kMaxDateFormat);
  const auto now = rt.now.value_or(std::chrono::system_clock::now());
  const std::time_t seconds = std::chrono::system_clock::to_time_t(std::chrono::floor<std::chrono::seconds>(now));
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now - std::chrono::floor<std::chrono::seconds>(now));
  std::tm parts{};
  localtime_r(&seconds, &parts);
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    if (++i == format.size()) {
      out += '%';
      break;
    }
    if (format[i] == 'f') {
      out += fmt::format("{:06}", micros.count());
    } else if (format[i] == '%') {
      out += '%';
    } else if (format[i] != 'z' && format[i] != 'Z') {
      std::string directive = {'%', format[i]};
      if ((format[i] == '-' || format[i] == '_' || format[i] == '0' || format[i] == '^' || format[i] == '#') &&
          i + 1 < format.size()) {
        directive += format[++i];
      }
      char buffer[256];
      out.append(buffer, strftime(buffer, sizeof(buffer), directive.c_str(), &parts));
    }
  }
  return rt.string(std::move(out));
}

}  // namespace

void bind_arguments(Runtime& rt, std::string_view function, const Args& args, const std::string_view* names,
                    size_t count, size_t required, Value* out) {
  if (args.positional.size() > count) {
    rt.fail("{}() takes at most {} argument(s) but {} were given", function, count, args.positional.size());
  }
  std::copy(args.positional.begin(), args.positional.end(), out);
  for (const auto& [name, value] : args.named) {
    const std::string_view* place = std::find(names, names + count, name);
    if (place == names + count) rt.fail("{}() got an unexpected keyword argument '{}'", function, name);
    Value& slot = out[place - names];
    if (!slot.missing()) rt.fail("{}() got multiple values for argument '{}'", function, name);
    slot = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (out[i].missing()) rt.fail("{}() missing required argument '{}'", function, names[i]);
  }
}

void expect_positional(Runtime& rt, std::string_view function, const Args& args, size_t least, size_t most) {
  if (!args.named.empty()) rt.fail("{}() takes no keyword arguments", function);
  const size_t n = args.positional.size();
  if (n < least || n > most) {
    rt.fail("{}() takes {} to {} arguments but {} were given", function, least, most, n);
  }
}

std::optional<Function> find_function(std::string_view name) {
  for (const FunctionName& f : kFunctions) {
    if (f.name == name) return f.function;
  }
  return std::nullopt;
}

Value call_function(Runtime& rt, Function function, const Args& args) {
  switch (function) {
    case Function::kRange:
      return make_range(rt, args);
    case Function::kDict: {
      auto* dict = rt.make<Dict>();
      fill_dict(rt, "dict", args, *dict);
      return Value::dict(dict);
    }
    case Function::kNamespace: {
      auto* space = rt.make<Namespace>();
      fill_dict(rt, "namespace", args, space->attributes);
      return Value::object(Kind::kNamespace, space);
    }
    case Function::kCycler: {
      if (!args.named.empty() || args.positional.empty()) rt.fail("cycler() needs at least one item");
      auto* cycler = rt.make<Cycler>();
      cycler->items = args.positional;
      return Value::object(Kind::kCycler, cycler);
    }
    case Function::kJoiner: {
      const auto bound = bind(rt, "joiner", args, {"sep"});
      auto* joiner = rt.make<Joiner>();
      joiner->separator = bound[0].missing() ? rt.string(", ") : bound[0];
      return Value::object(Kind::kJoiner, joiner);
    }
    case Function::kRaiseException: {
      const auto bound = bind(rt, "raise_exception", args, {"message"}, 1);
      rt.fail(to_text(rt, bound[0]));
    }
    case Function::kStrftimeNow:
      return strftime_now(rt, args);
  }
  rt.fail("unknown function");
}

}  // namespace nfp::jinja
