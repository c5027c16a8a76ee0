#include "text/jinja/chat_template.h"

#include <gtest/gtest.h>

#include <thread>

#include "text/jinja/value.h"

namespace nfp {
namespace {

using nlohmann::ordered_json;

ChatTemplateInput with(ordered_json extra) {
  ChatTemplateInput input;
  input.messages = ordered_json::parse(
      R"([{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi é "}, {"role": "user"}])");
  input.bos_token = "<s>";
  input.extra = std::move(extra);
  return input;
}

Result<std::string> render(const std::string& source, const ChatTemplateInput& input) {
  auto chat = ChatTemplate::parse(source, "t");
  if (!chat.ok()) return chat.error();
  return chat->render(input);
}

std::string rendered(const std::string& source, ordered_json extra = ordered_json::object()) {
  const auto text = render(source, with(std::move(extra)));
  return text.ok() ? *text : "ERROR: " + text.error().message;
}

std::string error_of(const std::string& source) {
  const auto text = render(source, with(ordered_json::object()));
  return text.ok() ? "no error: " + *text : text.error().message;
}

TEST(ChatTemplate, RendersAConversation) {
  EXPECT_EQ(
      rendered("{{ bos_token }}{% for m in messages[:2] %}[{{ m.role }}] {{ m['content'] | trim }}\n{% endfor %}"),
      "<s>[system] Be kind.\n[user] Hi é\n");
  ChatTemplateInput input;
  input.add_generation_prompt = true;
  EXPECT_EQ(
      *render("{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ bos_token is defined }}", input),
      "[]NoneNoneTrueFalse");
}

TEST(ChatTemplate, TrimsBlocksAndStripsTheLineBeforeThem) {
  EXPECT_EQ(rendered("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
  EXPECT_EQ(rendered("a \n {%- if true -%} \n b {%- endif %}"), "ab");
  EXPECT_EQ(rendered("  {%+ if true %}x{% endif +%}\ny"), "  x\ny");
  EXPECT_EQ(rendered("a {# note #}\n b {#- note -#} \n c"), "a  bc");
  EXPECT_EQ(rendered("{{ {'a': {'b': 1}} }}|{{ '}}' }}"), "{'a': {'b': 1}}|}}");
}

TEST(ChatTemplate, PrintsAsPythonDoes) {
  EXPECT_EQ(rendered("{{ [1, 1.0] + v + [0.1, true, none, 'a\\'b', \"q\\\"'\", 'é\\n\\x01', (1,), ()] }}",
                     {{"v", {1e16, 1e-5}}}),
            R"([1, 1.0, 1e+16, 1e-05, 0.1, True, None, "a'b", 'q"\'', 'é\n\x01', (1,), ()])");
  EXPECT_EQ(rendered("{{ big }} {{ big + 1 }}", {{"big", 18446744073709551615u}}),
            "18446744073709551615 18446744073709551616");
  EXPECT_EQ(rendered("{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 * 3 }} {{ 2.5 + 1 }}"),
            "3 -4 2 3.5 6 3.5");
}

TEST(ChatTemplate, UndefinedPrintsNothingButCannotBeUsed) {
  EXPECT_EQ(rendered("[{{ nope }}{{ messages[9] }}{{ messages[2].content }}{% for x in nope %}x{% endfor %}]"), "[]");
  EXPECT_EQ(rendered("{{ nope is defined }} {{ nope | default('d') }} {{ nope == nada }} {{ [nope] }}"),
            "False d True [Undefined]");
  EXPECT_EQ(error_of("\n{{ nope.attribute }}"), "chat template 't' line 2: 'nope' is undefined");
  EXPECT_EQ(error_of("{{ messages[0].nope + 'x' }}"),
            "chat template 't' line 1: 'dict object' has no attribute 'nope'");
  EXPECT_EQ(error_of("{{ nope() }}"), "chat template 't' line 1: 'nope' is undefined");
}

TEST(ChatTemplate, ScopesAreThoseOfJinja) {
  EXPECT_EQ(rendered("{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}"), "1");
  EXPECT_EQ(
      rendered("{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}"),
      "4");
  EXPECT_EQ(rendered("{% if true %}{% set x = 3 %}{% endif %}{{ x }}"), "3");
  EXPECT_EQ(rendered("{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}c"), "12c");
}

TEST(ChatTemplate, VariablesThatAScopeAssignsFirstAreItsOwn) {
  const ordered_json k = {{"k", "K"}};
  EXPECT_EQ(rendered("{% set k %}[{{ k }}]{% endset %}{{ k }}", k), "[]");
  EXPECT_EQ(rendered("{% macro m() %}[{{ k }}]{% endmacro %}{{ m() }}{% set k = 1 %}{{ m() }}", k), "[][1]");
  EXPECT_EQ(rendered("{% for i in 'ab' %}{% for j in 'c' %}[{{ k }}]{% endfor %}{% set k = i %}{% endfor %}", k),
            "[][]");
  EXPECT_EQ(
      rendered("{% for i in '' %}{% else %}{% set z %}[{{ k }}]{% endset %}{{ z }}{% set k = 1 %}{% endfor %}", k),
      "[]");
  EXPECT_EQ(rendered("{% filter replace('a', k) %}a{% set k = 'b' %}{% endfilter %}{{ k }}", k), "bK");
  // Read before, known to a scope around, or assigned in an `if` only: the variable from outside.
  EXPECT_EQ(rendered("{{ k }}{% set k %}[{{ k }}]{% endset %}{{ k }}", k), "K[K]");
  EXPECT_EQ(rendered("{{ k }}{% for i in 'ab' %}{% for j in 'c' %}[{{ k }}]{% endfor %}{% set k = i %}{% endfor %}", k),
            "K[K][K]");
  EXPECT_EQ(
      rendered("{% macro m() %}[{{ k }}]{% endmacro %}{{ m() }}{% if true %}{% set k = 1 %}{% endif %}{{ m() }}", k),
      "[K][1]");
}

TEST(ChatTemplate, CallBlocksGiveTheirBodyToAMacro) {
  const std::string macro = "{% macro m(a) %}<{{ caller(a) if caller else '-' }}>{% endmacro %}";
  EXPECT_EQ(rendered(macro + "{{ m(1) }}{% call(x, y=3) m(1) %}{{ x }}{{ y }}{% endcall %}"), "<-><13>");
  EXPECT_EQ(rendered(macro + "{% for i in 'ab' %}{% call(x) m(1) %}{{ i }}{{ loop.index }}{% endcall %}{% endfor %}"),
            "<a1><b2>");
  EXPECT_EQ(rendered(macro + "{% call(x) m(1) %}{% call(y) m(2) %}{{ x }}{{ y }}{% endcall %}{% endcall %}"), "<<12>>");
  // A body that asks for `caller` has its own, which nobody gave it.
  EXPECT_EQ(error_of("{% macro o() %}{{ caller() }}{% endmacro %}{% macro m() %}{% call o() %}{{ caller() }}{% endcall "
                     "%}{% endmacro %}{% call m() %}{% endcall %}"),
            "chat template 't' line 1: No caller defined");
  EXPECT_EQ(error_of("{% macro m() %}{% endmacro %}{% call m() %}{% endcall %}"),
            "chat template 't' line 1: macro 'm' takes no keyword argument 'caller'");
  EXPECT_EQ(error_of("{% call dict() %}{% endcall %}"),
            "chat template 't' line 1: a call block's call gave a value of type 'dict'");
  EXPECT_EQ(error_of("{% call m %}{% endcall %}"), "chat template 't' line 1: syntax error: expected call");
  EXPECT_EQ(error_of("{% macro m(caller) %}{{ caller }}{% endmacro %}"),
            "chat template 't' line 1: syntax error: the argument 'caller' of a macro must be given a default");
}

TEST(ChatTemplate, MacrosTakeFurtherArguments) {
  const std::string macro = "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}";
  EXPECT_EQ(rendered(macro + "{{ m(1) }} {{ m(1, 2, x=3) }} {{ m(x=3, a=1) }}"), "1(){} 1(2,){'x': 3} 1(){'x': 3}");
  EXPECT_EQ(rendered(macro + "{{ m(*[1, 2], **{'x': 3}) }} {{ m(*'ab', x=3) }}"), "1(2,){'x': 3} a('b',){'x': 3}");
  // A macro within another has its own; a parameter of the name is one like others.
  EXPECT_EQ(rendered("{% macro o() %}{% macro i() %}{{ varargs }}{% endmacro %}{{ i(1) }}{{ varargs }}{% endmacro %}"
                     "{{ o(2) }}"),
            "(1,)(2,)");
  EXPECT_EQ(rendered("{% macro m(varargs, kwargs=4) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(3) }}"), "34");
  EXPECT_EQ(rendered("{% macro m() %}{{ caller(1, 2, z=3) }}{% endmacro %}{% call m() %}{{ varargs }}{{ kwargs }}"
                     "{% endcall %}{{ varargs }}"),
            "(1, 2){'z': 3}");
  EXPECT_EQ(rendered("{% macro w(f) %}{{ f(*varargs, **kwargs) }}{% endmacro %}{% macro g(a, b=1) %}{{ a }}{{ b }}"
                     "{% endmacro %}{{ w(g, 5, b=6) }}{{ dict({'a': 1}, **{'b': 2}) }}"),
            "56{'a': 1, 'b': 2}");
  EXPECT_EQ(error_of("{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(1) }}"),
            "chat template 't' line 1: macro 'm' takes not more than 0 argument(s)");
  EXPECT_EQ(error_of(macro + "{{ m(**{'a': 1}, **{}) }}"),
            "chat template 't' line 1: syntax error: invalid syntax for function call expression");
  EXPECT_EQ(error_of(macro + "{{ m(a=1, **{'a': 1}) }}"),
            "chat template 't' line 1: got multiple values for keyword argument 'a'");
  EXPECT_EQ(error_of(macro + "{{ m(**[1]) }}"),
            "chat template 't' line 1: the argument after ** must be a mapping, not list");
}

TEST(ChatTemplate, LoopsGoIntoWhatTheyFind) {
  EXPECT_EQ(rendered("{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}"
                     "{{ loop.depth }}{{ loop.depth0 }}{{ x }}{% endif %}{% endfor %}"),
            "101(212(323))");
  EXPECT_EQ(rendered("{% for x in [1, 1, 2] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }} {% endfor %}"),
            "aTrue bFalse aTrue ");
  EXPECT_EQ(error_of("{% for x in [1] %}{{ loop([]) }}{% endfor %}"),
            "chat template 't' line 1: a loop without 'recursive' cannot be called");
  EXPECT_NE(error_of("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}").find("nested deeper than"),
            std::string::npos);
}

TEST(ChatTemplate, OperatorsAreThoseOfPython) {
  EXPECT_EQ(rendered("{{ 2 ** 10 }} {{ -2 ** 2 }} {{ 2 ** -1 }} {{ 2 ** 3 ** 2 }} {{ +3 }} {{ +-x }}", {{"x", 1.5}}),
            "1024 4 0.5 64 3 -1.5");
  EXPECT_EQ(rendered("{{ 7.5 // 2 }} {{ -7.5 // 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ 6.0 % 3 }}"),
            "3.0 -4.0 0.5 -0.5 0.0");
  EXPECT_EQ(rendered("{{ [1, 2] * 2 }} {{ 2 * (1,) }} {{ [1] * -1 }} {{ 1e3 }} {{ 2.5E-3 }} {{ 1 is sameas 1 }}"),
            "[1, 2, 1, 2] (1, 1) [] 1000.0 0.0025 True");
  for (const char* source : {"{{ 1.5 // 0 }}", "{{ 1.5 % 0 }}", "{{ 0 ** -1 }}", "{{ +'a' }}", "{{ 'a' ** 2 }}"}) {
    EXPECT_NE(error_of(source), "") << source;
  }
}

TEST(ChatTemplate, FiltersAndTestsOfNumbersAndTexts) {
  EXPECT_EQ(rendered("{{ -3 | abs }}{{ '3.5' | float }} {{ 'a' | float(1) }} {{ '1.9' | int }} {{ 2.675 | round(2) }} "
                     "{{ 2.5 | round }} {{ 2.41 | round(1, 'ceil') }} {{ 7 | round }}"),
            "33.5 1 1 2.67 2.0 2.5 7");
  EXPECT_EQ(rendered("{{ [1, 2.5] | sum }} {{ [{'a': 1}, {'a': 2}] | sum(attribute='a', start=3) }} "
                     "{{ [1, 2, 3] | batch(2, 0) | list }} {{ '<a>' | e }}"),
            "3.5 6 [[1, 2], [3, 0]] &lt;a&gt;");
  EXPECT_EQ(rendered("{{ [{'a': 2, 'b': 1}, {'a': 1, 'b': 2}, {'a': 1, 'b': 1}] | sort(attribute='a,b') | "
                     "map(attribute='b') | join }}"),
            "121");
  EXPECT_EQ(rendered("{{ 6 is divisibleby 3 }}{{ 'a1' is lower }}{{ 'aB' is upper }}{{ range is callable }}"
                     "{{ nope is callable }}{{ 1 is lessthan 2 }}"),
            "TrueTrueFalseTrueTrueTrue");
}

TEST(ChatTemplate, FormatsWithPercent) {
  EXPECT_EQ(rendered("{{ '<|%s|>%s' % ('user', none) }}{{ '%s' % 'a' }}{{ '%d%%' % 7.9 }}{{ '%r' % 'a' }}"),
            "<|user|>Nonea7%'a'");
  EXPECT_EQ(
      rendered("[{{ '%5s|%-5s|%.2s' % ('a', 'b', '\u00e9\u00e9\u00e9') }}][{{ '%05.1f|%+d|%03d' % (2.25, 3, -7) }}]"),
      "[    a|b    |\xC3\xA9\xC3\xA9][002.2|+3|-07]");
  EXPECT_EQ(
      rendered(
          "{{ '%(a)s %(b)d' % {'a': 1, 'b': 2, 'c': 3} }} {{ '%s-%s' | format(1, [2]) }} {{ '%(x)s' | format(x=3) }}"),
      "1 2 1-[2] 3");
  EXPECT_EQ(rendered("{{ ('<%s>' | safe) % '<' }}{{ ('a' | safe) % nope }}"), "<&lt;>a");
  // As int() and float() read them, of a safe string alone.
  EXPECT_EQ(rendered("{{ ('%d %05.1f %i' | safe) % (' 12 ', '-3' | safe, '+5') }} {{ ('%f' | safe) % '1e3' }}"),
            "12 -03.0 5 1000.000000");
  for (const char* source :
       {"{{ ('%d' | safe) % '7.9' }}", "{{ ('%f' | safe) % 'x' }}", "{{ ('%d' | safe) % none }}", "{{ '%s' % () }}",
        "{{ '%s' % (1, 2) }}", "{{ '%d' % 'a' }}", "{{ '%' % 1 }}", "{{ 'a' % 1 }}", "{{ '%(a)s' % 1 }}",
        "{{ '%(a)s' % {} }}", "{{ '%999999999999d' % 1 }}"}) {
    EXPECT_NE(error_of(source), "") << source;
  }
}

TEST(ChatTemplate, MethodsOfTextsAndLists) {
  EXPECT_EQ(rendered("{{ 'a b c'.rsplit(none, 1) }}{{ 'aaa'.rsplit('aa') }}{{ 'a=b=c'.partition('=') }}"
                     "{{ 'a=b=c'.rpartition('=') }}{{ 'x'.partition('=') }}"),
            "['a b', 'c']['a', '']('a', '=', 'b=c')('a=b', '=', 'c')('x', '', '')");
  EXPECT_EQ(rendered("{{ '\u00e9l\u00e9l'.rfind('l') }}{{ 'abcabc'.find('a', 1) }}{{ 'abc'.find('', 3, 2) }}"
                     "{{ 'abab'.count('ab', -2) }}{{ 'abc'.startswith('b', 1) }}{{ 'abc'.index('c') }}"),
            "33-11True2");
  EXPECT_EQ(rendered("{{ 'get_x'.removeprefix('get_') }}{{ 'a.py'.removesuffix('.py') }}[{{ 'ab'.center(5, '*') }}]"
                     "[{{ 'ab'.ljust(3) }}][{{ 'ab'.rjust(3) }}]{{ '-7'.zfill(4) }}{{ 'abc'.replace('', '-', 2) }}"),
            "xa[**ab*][ab ][ ab]-007-a-bc");
  EXPECT_EQ(rendered("{{ '12'.isdigit() }}{{ 'a1'.isalnum() }}{{ 'Ab'.isupper() }}{{ '\u00a0 '.isspace() }}"),
            "TrueTrueFalseTrue");
  EXPECT_EQ(rendered("{{ [3, 1].index(1) }}{{ (1, 1, 2).count(1) }}{{ [1].copy() }}{{ {'a': 1}.copy() }}"
                     "{{ dict([('a', 1)], b=2) }}{{ namespace({'a': 1}).a }}"),
            "12[1]{'a': 1}{'a': 1, 'b': 2}1");
  EXPECT_NE(error_of("{{ 'abc'.index('x') }}"), "");
  EXPECT_NE(error_of("{{ [1].index(2) }}"), "");
}

TEST(ChatTemplate, WhatIsMadeLongerIsBounded) {
  for (const char* source : {"{{ 'x'.center(10 ** 15) }}", "{{ 'x'.zfill(10 ** 30) }}", "{{ [0] * 10 ** 12 }}",
                             "{{ [1] | batch(10 ** 12, 'x') | list }}"}) {
    const auto text = render(source, {});
    ASSERT_FALSE(text.ok()) << source;
    EXPECT_EQ(text.error().code, ErrorCode::kResource) << text.error().message;
  }
  EXPECT_NE(error_of("{{ 10 ** 10 ** 10 }}").find("an integer is too large"), std::string::npos);
}

TEST(ChatTemplate, LoopsKnowWhereTheyStand) {
  EXPECT_EQ(rendered("{% for x in 'abc' if x != 'b' %}{{ loop.index }}{{ loop.last }}{{ loop.length }} {% endfor %}"),
            "1False2 2True2 ");
  EXPECT_EQ(rendered("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}"), "a=1");
  EXPECT_EQ(rendered("{% for x in range(9) %}{% if x == 1 %}{% continue %}{% elif x > 2 %}{% break %}{% endif %}{{ x }}"
                     "{% endfor %}"),
            "02");
  EXPECT_EQ(rendered("{% set ns = namespace(go=true) %}{% for x in 'abc' if ns.go %}{{ x }}{% set ns.go = x != 'b' %}"
                     "{% endfor %}"),
            "ab");
}

TEST(ChatTemplate, ToJsonIsPythonsJsonDumps) {
  EXPECT_EQ(
      rendered("{{ v | tojson }}", {{"v", ordered_json::parse(R"({"b": [1, 2.0, null, true], "a": "<é>\"\n"})")}}),
      R"({"b": [1, 2.0, null, true], "a": "<é>\"\n"})");
  EXPECT_EQ(rendered("{{ {'b': 1, 'a': []} | tojson(indent=2, sort_keys=true) }}"), "{\n  \"a\": [],\n  \"b\": 1\n}");
  EXPECT_EQ(rendered("{{ ['é😀', 1] | tojson(ensure_ascii=true, separators=(',', ':')) }}"),
            R"(["\u00e9\ud83d\ude00",1])");
  EXPECT_EQ(error_of("{{ nope | tojson }}"),
            "chat template 't' line 1: Object of type Undefined is not JSON serializable");
}

TEST(ChatTemplate, TextIsUnicode) {
  EXPECT_EQ(rendered("{{ s | length }} {{ s[1] }} {{ s[::-1] }} {{ s | upper }} {{ 'ΑΣ'.lower() }} {{ s.find('語') }}",
                     {{"s", "ß語é"}}),
            "3 語 é語ß SS語É ας 1");
}

TEST(ChatTemplate, TheSandboxRefusesChanges) {
  EXPECT_EQ(error_of("{{ messages.append(1) }}"),
            "chat template 't' line 1: access to attribute 'append' of 'list' object is unsafe.");
  EXPECT_EQ(error_of("{% set messages[0] = 1 %}").find("chat template 't' line 1: syntax error"), 0u);
  EXPECT_EQ(rendered("[{{ ''.__class__ }}]"), "[]");
}

TEST(ChatTemplate, ErrorsNameTemplateAndLine) {
  EXPECT_EQ(error_of("\n\n{{ raise_exception('roles must\nalternate') }}"),
            "chat template 't' line 3: roles must alternate");
  EXPECT_EQ(error_of("a\n{% if %}"), "chat template 't' line 2: syntax error: Expected an expression, got '%}'");
  EXPECT_EQ(error_of("{% for x in y %}"),
            "chat template 't' line 1: syntax error: unexpected end of the template: 'endfor' is missing");
  EXPECT_EQ(error_of("{{ 'a }}"),
            "chat template 't' line 1: syntax error: unexpected char ''': a string without its end");
  EXPECT_EQ(error_of("{% include 'x' %}"),
            "chat template 't' line 1: syntax error: the tag 'include' is not supported in chat templates");
  EXPECT_EQ(error_of("{{ 1 | nosuch }}"),
            "chat template 't' line 1: the filter nosuch is not supported in chat templates");
}

TEST(ChatTemplate, SafeTextEscapesWhatItIsJoinedWith) {
  EXPECT_EQ(rendered("{{ {'a': '<b>'} | tojson | safe }}{{ '<' ~ (1 | safe) + '&' }}"), "{\"a\": \"<b>\"}<1&");
  EXPECT_EQ(rendered("{{ ('<' | safe) + '&\"' + \"'\" }} {{ '>' + ('<' | safe) }} {{ ('a'|safe) + ('<'|safe) }}"),
            "<&amp;&#34;&#39; &gt;< a<");
  for (const char* still_safe :
       {"s | trim", "s | upper", "s | string", "s * 2", "s[1:]", "s[0]", "s | last", "s | reverse", "s | indent",
        "s.strip()", "s.lower()", "s.split()[0]", "s.splitlines()[0]", "s.join(['a'])", "s.replace('a', 'b')",
        "s.format()", "s | default('x')"}) {
    EXPECT_TRUE(rendered(fmt::format("{{% set s = '<a' | safe %}}{{{{ ({}) + '<' }}}}", still_safe)).ends_with("&lt;"))
        << still_safe;
  }
  EXPECT_EQ(rendered("{% set s = '<a' | safe %}{{ s.replace('a', '>') }} {{ s.join('&&') }} {{ ('{}{}' | "
                     "safe).format(s, 1 > 2) }} "
                     "{{ [s] }} {{ s | replace('a', '>') + '<' }} {{ s == '<a' }} {{ {'<a': 1}[s] }}"),
            "<&gt; &amp;<a&amp; <aFalse [Markup('<a')] <>< True 1");
}

TEST(ChatTemplate, CyclersTurn) {
  EXPECT_EQ(rendered("{% set c = cycler('a', 2) %}{{ c.current }}{% for i in range(3) %}{{ c.next() }}{% endfor %}"
                     "{{ c.current }}{{ c.pos }}{{ c.reset() }}{{ c.current }}{{ c.items }}"),
            "aa2a21Nonea('a', 2)");
  EXPECT_NE(error_of("{{ cycler() }}").find("at least one item has to be provided"), std::string::npos);
}

// What jinja2 has and no chat template uses is refused by its name, where it is parsed or where it runs.
TEST(ChatTemplate, NamesWhatIsNotSupported) {
  for (const auto& [source, name] : std::vector<std::pair<std::string, std::string>>{
           {"{{ 1 | filesizeformat }}", "the filter filesizeformat is"},
           {"{{ [1] | map('urlize') }}", "the filter urlize is"},
           {"{{ 'a' is filter }}", "the test filter is"},
           {"{{ [1] | select('test') }}", "the test test is"},
           {"{{ '%x' % 1 }}", "the format x of % is"},
           {"{{ '{:>9}'.format(1) }}", "a field of str.format that is no name or number is"},
           {"{{ '{a.b}'.format(a=1) }}", "a field of str.format that is no name or number is"},
           {"{{ 'a'.encode() }}", "the method encode of str is"},
           {"{{ '\xC3\xA9'.isalpha() }}", "the kind of characters other than ASCII's is"},
           {"{{ lipsum() }}", "the function lipsum is"},
           {"{{ (-8) ** 0.5 }}", "complex numbers are"},
           {"{{ 1_000 }}", "syntax error: a number with an underscore or another base is"},
           {"{{ 1e999 }}", "syntax error: a number beyond floats is"},
           {"{{ '1_0.5' | float }}", "a number with an underscore is"},
           {"{{ 25 | round(-1) }}", "round to -1 digits is"},
           {"{{ {2.5: 1} }}", "a dict's key of type 'float' is"},
           {"{{ range(3) }}", "printing a value of type 'view' is"},
           {"{{ range(3)[1] }}", "an item of a view or range is"},
           {"{{ '\xEF\xAC\x81' | upper }}", "a capital of several letters (SpecialCasing of Unicode) is"}}) {
    EXPECT_EQ(error_of(source).find("chat template 't' line 1: " + name + " not supported in chat templates"), 0u)
        << source << ": " << error_of(source);
  }
  EXPECT_EQ(rendered("{% if false %}{{ 1 | filesizeformat }}{% endif %}ok"), "ok");
}

TEST(ChatTemplate, RefusesTextThatIsNotUtf8) {
  EXPECT_FALSE(ChatTemplate::parse("\xff", "t").ok());
  ChatTemplateInput input;
  input.messages = {{{"role", "user"}, {"content", "\xc3"}}};
  EXPECT_EQ(render("{{ messages[0].content }}", input).error().code, ErrorCode::kInvalidInput);
}

TEST(ChatTemplate, StrftimeNowUsesLocalTimeWithoutAZone) {
  ChatTemplateInput input;
  input.now = std::chrono::system_clock::from_time_t(0) + std::chrono::hours(24 * 200) + std::chrono::milliseconds(5);
  EXPECT_EQ(*render("{{ strftime_now('%Y %f[%Z%z]%%') }}", input), "1970 005000[]%");
}

TEST(ChatTemplate, GenerationTagIsABlockOfItsOwn) {
  EXPECT_EQ(rendered("{% set x = 1 %}{% generation %}a{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"), "a21");
}

TEST(ChatTemplate, RawTextIsNotLookedInto) {
  EXPECT_EQ(rendered("{% raw %}{{ a }}{% if %}{# b #}{% endraw %}c"), "{{ a }}{% if %}{# b #}c");
  EXPECT_EQ(rendered("a\n  {% raw %}\n {% x %}\n  {% endraw %}\nb"), "a\n\n {% x %}\nb");
  EXPECT_EQ(rendered("a {%- raw -%} {{ }} {%- endraw -%} b"), "a{{ }}b");
  EXPECT_EQ(rendered("{% raw %} {%+ endraw +%}\nb"), " \nb");
  EXPECT_NE(error_of("{% raw %}{% endraw"), "");
}

TEST(ChatTemplate, WithGivesItsBodyVariablesOfItsOwn) {
  EXPECT_EQ(
      rendered("{% set a = 1 %}{% with a = a + 1, b = a %}{{ a }}{{ b }}{% set c = 3 %}{% endwith %}{{ a }}{{ c }}"),
      "211");
  EXPECT_EQ(rendered("{% with a, b = 'xy' %}{{ b }}{{ a }}{% endwith %}{% with %}z{% endwith %}"), "yxz");
  EXPECT_EQ(rendered("{% for i in [1, 2, 3] %}{% with j = i %}{% if j == 2 %}{% break %}{% endif %}{{ j }}{% endwith %}"
                     "{% endfor %}"),
            "1");
  EXPECT_NE(error_of("{% with a %}{% endwith %}"), "");
}

TEST(ChatTemplate, LiteralsAreThoseOfJinja) {
  EXPECT_EQ(rendered("{{ 00 }}{{ 0 }}{{ 07.5 }}"), "007.5");
  EXPECT_NE(error_of("{{ 007 }}"), "");
  // Python's unicode-escape, which reads them as \xe9 and the like, behind a backslash.
  EXPECT_EQ(rendered(R"({{ '\é\日\🙂\q' }})"), R"(\xe9\u65e5\U0001f642\q)");
}

TEST(ChatTemplate, FilterBlocksFilterWhatTheyPrint) {
  EXPECT_EQ(rendered("[{% filter trim | replace('a', 'b') %} a{% set x = 1 %}{{ x }} {% endfilter %}{{ x }}]"), "[b1]");
  EXPECT_EQ(rendered("{% for x in 'abc' %}{% filter upper %}{% if x == 'b' %}{% continue %}{% endif %}{{ x }}"
                     "{% endfilter %}{% endfor %}"),
            "AC");
  EXPECT_EQ(error_of("\n{% filter length %}abc{% endfilter %}"),
            "chat template 't' line 2: a filter block's text became a value of type 'int'");
  EXPECT_EQ(error_of("{% filter %}{% endfilter %}"),
            "chat template 't' line 1: syntax error: expected a name, got '%}'");
}

TEST(ChatTemplate, SmallestLargestAndUniqueItems) {
  EXPECT_EQ(
      rendered("{{ [2, 1.0, 3, true] | min }} {{ [2, 3] | max }} {{ ['b', 'A'] | min }} {{ ['b', 'A'] | max(true) }} "
               "[{{ [] | min }}] {{ messages | max(attribute='role') }}"),
      "1.0 3 A b [] {'role': 'user', 'content': ' Hi é '}");
  EXPECT_EQ(rendered("{{ ['a', 'A', 1, true, 'b'] | unique | list }} {{ 'aAa' | unique(true) | join }} "
                     "{{ messages | map(attribute='role') | unique | join('|') }}"),
            "['a', 1, 'b'] aA system|user");
  EXPECT_EQ(error_of("\n{{ [1, 'a'] | min }}"),
            "chat template 't' line 2: '<' not supported between instances of 'str' and 'int'");
  EXPECT_EQ(error_of("{{ [[1]] | unique | list }}"),
            "chat template 't' line 1: unique of a value of type 'list' is not supported in chat templates");
}

TEST(ChatTemplate, FormatTakesNamesAndNumbers) {
  EXPECT_EQ(
      rendered("{{ '<{}|{}>{{}}'.format(1.0, nope) }} {{ '{1}{0}{é}'.format('a', none, é=[1]) }} {{ ''.format(1) }}"),
      "<1.0|>{} Nonea[1] ");
  EXPECT_EQ(error_of("{{ '{}{}'.format(1) }}"), "chat template 't' line 1: format() has no argument for the field {}");
  EXPECT_EQ(
      error_of("{{ '{999999999999999999999999999999999999999999}'.format(1) }}"),
      "chat template 't' line 1: format() has no argument for the field {999999999999999999999999999999999999999999}");
  EXPECT_EQ(error_of("{{ '{a}'.format(b=1) }}"),
            "chat template 't' line 1: format() has no argument for the field {a}");
  EXPECT_EQ(error_of("{{ '{0}{}'.format(1) }}"),
            "chat template 't' line 1: format() has fields with numbers and without");
  EXPECT_EQ(error_of("\n{{ 'a}'.format(1) }}"), "chat template 't' line 2: Single '}' encountered in format string");
}

TEST(ChatTemplate, Mentions) {
  const auto chat = ChatTemplate::parse("{% if tools %}{{ tools | tojson }}{% endif %}{% set y = 1 %}{{ m.x }}", "t");
  ASSERT_TRUE(chat.ok());
  EXPECT_TRUE(chat->mentions("tools"));
  EXPECT_TRUE(chat->mentions("m"));
  EXPECT_FALSE(chat->mentions("x"));
  EXPECT_FALSE(chat->mentions("y"));
  EXPECT_FALSE(chat->mentions("enable_thinking"));
}

// Each of these would run, recurse or grow without end.
TEST(ChatTemplateLimits, EndHostileTemplates) {
  const std::string deep = std::string("{% set ns = namespace(x=range(1000) | list) %}{% for i in range(500) %}") +
                           "{% set ns.x = [ns.x] %}{% endfor %}{% for i in range(200) %}" +
                           "{{ '' if ns.x | tojson(indent='') }}{% endfor %}";
  for (const char* source :
       {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}0123456789{% endfor %}{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{{ ('x' * 1000000) * 1000000 }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(100000) %}{% set ns.x = ns.x + [range(100000)] %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for a in range(100000) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(100000) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{{ [1, 2] | tojson(indent=99999999999) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
        "{{ 'a' | indent(99999999999, true) }}",
        "{{ range(100000) | reverse | sort }}",
        "{% set a = 'a' * 3000000 %}{% for i in range(100000) %}{{ '' if (a ~ 'b') in a }}{% endfor %}",
        "{% set a = 'a' * 300000 %}{% for i in range(100000) %}{{ (a ~ a).find('ab' ~ a) }}{% endfor %}",
        "{% set a = ' ' * 100000 %}{% for i in range(20000) %}{{ a | int }}{% endfor %}",
        "{% set a = ' ' * 100000 %}{% for i in range(20000) %}{{ [] | tojson(indent=a) }}{% endfor %}",
        "{% set a = ' ' * 100000 %}{% for i in range(20000) %}{{ [] | tojson(separators=(a, a)) }}{% endfor %}",
        "{% set a = 'é' * 3000 %}{% for i in range(5000) %}{{ '' if a.strip('àáâãäåæçèêëìíîïðñòóôéé') }}{% endfor %}",
        deep.c_str()}) {
    ChatTemplateInput input = with(ordered_json::object());
    input.limits.max_steps = 1'000'000;
    input.limits.max_output_bytes = 1 << 20;
    input.limits.max_memory_bytes = 64 << 20;
    const auto text = render(source, input);
    ASSERT_FALSE(text.ok()) << source;
    EXPECT_EQ(text.error().code, ErrorCode::kResource) << source << ": " << text.error().message;
  }
  EXPECT_EQ(error_of("{{ range(100001) }}"),
            "chat template 't' line 1: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  EXPECT_EQ(error_of("{{ 999999999999999999999 * 9999999999999999999999999 }}"),
            "chat template 't' line 1: an integer is too large");
}

// An undefined value keeps its message as long as the render lasts.
TEST(ChatTemplateLimits, MessagesOfUndefinedValuesAreShortAndCounted) {
  const std::string name(400'000, 'x');
  const std::string shown = "'" + name.substr(0, 50) + "'";
  EXPECT_EQ(error_of("{{ " + name + " + 1 }}"), "chat template 't' line 1: " + shown + " is undefined");
  EXPECT_EQ(error_of("{% macro f(" + name + ") %}{{ " + name + " + 1 }}{% endmacro %}{{ f() }}"),
            "chat template 't' line 1: parameter " + shown + " was not provided");
  EXPECT_EQ(rendered("{% for i in range(20000) %}{{ " + name + " }}{% endfor %}"), "");

  ChatTemplateLimits limits;
  limits.max_memory_bytes = 1 << 20;
  jinja::Runtime runtime(limits);
  EXPECT_TRUE(runtime.undefined(std::string(1000, 'x')).undefined());
  EXPECT_THROW(runtime.undefined(std::string(1 << 20, 'x')), jinja::Failure);
}

TEST(ChatTemplateLimits, ParserRefusesDeepNesting) {
  for (const auto& [open, close] : std::vector<std::pair<std::string, std::string>>{{"(", ")"},
                                                                                    {"[", "]"},
                                                                                    {"{1:", "}"},
                                                                                    {"-", ""},
                                                                                    {"not ", ""},
                                                                                    {"a(", ")"},
                                                                                    {"a[", "]"},
                                                                                    {"1 if 1 else ", ""},
                                                                                    {"", ".a"},
                                                                                    {"", "|list"},
                                                                                    {"", " + 1"},
                                                                                    {"", " and 1"},
                                                                                    {"", " is defined"}}) {
    std::string before, after;
    for (int i = 0; i < 100'000; ++i) {
      before += open;
      after += close;
    }
    EXPECT_FALSE(ChatTemplate::parse(fmt::format("{{{{ {}x{} }}}}", before, after), "t").ok()) << open << close;
  }
  std::string ifs;
  for (int i = 0; i < 100'000; ++i) ifs += "{% if 1 %}";
  EXPECT_FALSE(ChatTemplate::parse(ifs, "t").ok());
}

TEST(ChatTemplate, OneTemplateServesManyThreads) {
  const auto chat = ChatTemplate::parse("{% for m in messages %}{{ m.content | upper ~ 'é' }}{% endfor %}", "t");
  ASSERT_TRUE(chat.ok());
  const ChatTemplateInput input = with(ordered_json::object());
  std::vector<std::thread> threads;
  std::vector<std::string> texts(4);
  threads.reserve(texts.size());
  for (std::string& text : texts) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) text = chat->render(input).value();
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& text : texts) EXPECT_EQ(text, "BE KIND.é HI É éé");
}

TEST(PickChatTemplate, ChoosesAsTransformersDoes) {
  const auto list = ordered_json::parse(
      R"([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}])");
  EXPECT_EQ(*pick_chat_template("S", true), "S");
  EXPECT_EQ(*pick_chat_template(list, false), "D");
  EXPECT_EQ(*pick_chat_template(list, true), "T");
  EXPECT_EQ(*pick_chat_template(list, true, "rag"), "R");
  EXPECT_EQ(pick_chat_template(list, true, "x").error().message,
            "field 'chat_template' has no template 'x'; it has: default, rag, tool_use");
  EXPECT_EQ(pick_chat_template(ordered_json::parse(R"([{"name": "rag", "template": "R"}])"), false).error().code,
            ErrorCode::kNotFound);
  EXPECT_EQ(pick_chat_template(7, false).error().code, ErrorCode::kInvalidInput);
  EXPECT_EQ(pick_chat_template(ordered_json::parse(R"([{"name": 1}])"), false).error().code, ErrorCode::kInvalidInput);
}

}  // namespace
}  // namespace nfp
