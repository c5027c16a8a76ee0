#include <fmt/format.h>
#include <fmt/ranges.h>

#include "shell/command_tree.h"

namespace nfp::shell {
namespace {

// Inside single quotes, of text that _arguments or _describe divides at colons and brackets.
std::string zsh_quoted(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\'') {
      out += "'\\''";
    } else if (c == '\n') {
      out += ' ';
    } else {
      if (c == ':' || c == '[' || c == ']' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out;
}

std::string value_action(const Argument& argument) {
  if (argument.choices.empty()) return "_files";
  return fmt::format("({})", fmt::join(argument.choices, " "));
}

std::string function_name(const std::string& parent, const Command& command) {
  std::string name = parent + "_" + command.name;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

std::string flag_spec(const Argument& flag) {
  const std::string all = fmt::format("{}", fmt::join(flag.names, " "));
  std::string out;
  for (const std::string& name : flag.names) {
    const std::string exclusive = flag.repeats ? "*" : "(" + all + ")";
    const std::string value = flag.value.empty() ? "" : ":" + flag.value + ":" + value_action(flag);
    out += fmt::format("    '{}{}[{}]{}' \\\n", exclusive, name, zsh_quoted(flag.help), value);
  }
  return out;
}

std::string function(const Command& command, const std::string& name) {
  std::string out;
  for (const Command& verb : command.commands) out += function(verb, function_name(name, verb));
  out += fmt::format("{}() {{\n  local context state state_descr ret=1\n  local -a line verbs\n  typeset -A opt_args\n",
                     name);
  out += "  _arguments -C -s \\\n";
  for (const Argument& flag : command.flags) out += flag_spec(flag);
  for (const Argument& flag : command.inherited) out += flag_spec(flag);
  size_t position = 1;
  for (const Argument& positional : command.positionals) {
    out += fmt::format("    '{}{}:{}:{}' \\\n", position++, positional.required ? "" : ":", positional.names.front(),
                       positional.choices.empty() ? "_nestedfp_models" : value_action(positional));
  }
  if (!command.commands.empty()) out += fmt::format("    '{}:verb:->verb' '*::arguments:->rest' \\\n", position);
  out += "    && ret=0\n";
  if (!command.commands.empty()) {
    out += "  case $state in\n    verb)\n      verbs=(\n";
    for (const Command& verb : command.commands) {
      out += fmt::format("        '{}:{}'\n", verb.name, zsh_quoted(verb.help));
    }
    out += fmt::format(
        "      )\n      _describe -t verbs verb verbs && ret=0\n      ;;\n    rest)\n      case $line[{}] in\n",
        position);
    for (const Command& verb : command.commands) {
      out += fmt::format("        {}) {} && ret=0 ;;\n", verb.name, function_name(name, verb));
    }
    out += "      esac\n      ;;\n  esac\n";
  }
  return out + "  return ret\n}\n\n";
}

}  // namespace

std::string zsh_completion(const Command& tree) {
  return fmt::format(
      "#compdef {0}\n# zsh completion for {0}, made by `{0} completion zsh`.\n\n"
      "_nestedfp_models() {{\n  local -a names\n  names=(${{(f)\"$({0} models --names 2>/dev/null)\"}})\n"
      "  _alternative 'files:file:_files' \"models:model:compadd -a names\"\n}}\n\n{1}"
      "if [[ $funcstack[1] == _{0} ]]; then\n  _{0} \"$@\"\nelse\n  compdef _{0} {0}\nfi\n",
      tree.name, function(tree, "_" + tree.name));
}

}  // namespace nfp::shell
