#include <fmt/format.h>
#include <fmt/ranges.h>

#include "shell/command_tree.h"

namespace nfp::shell {
namespace {

std::string fish_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "'";
}

std::string verbs_of(const Command& command) {
  std::string out;
  for (const Command& verb : command.commands) out += (out.empty() ? "" : " ") + verb.name;
  return out;
}

// `where`: the condition under which `command` is being completed.
void add(const std::string& program, const Command& command, const std::string& where, std::string& out) {
  const std::string head = fmt::format("complete -c {} -n {}", program, fish_quoted(where));
  for (const Argument& flag : command.flags) {
    out += head;
    for (const std::string& name : flag.names) {
      out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    }
    if (!flag.choices.empty()) {
      out += " -x -a " + fish_quoted(fmt::format("{}", fmt::join(flag.choices, " ")));
    } else if (!flag.value.empty()) {
      out += " -r";
    }
    out += " -d " + fish_quoted(flag.help) + "\n";
  }
  for (const Argument& positional : command.positionals) {
    if (positional.choices.empty()) {
      out += fmt::format("{} -a '({} models --names 2>/dev/null)'\n", head, program);
    } else {
      out += fmt::format("{} -f -a {}\n", head, fish_quoted(fmt::format("{}", fmt::join(positional.choices, " "))));
    }
  }
  const std::string none =
      (where.empty() ? "" : where + "; and ") + "not __fish_seen_subcommand_from " + verbs_of(command);
  for (const Command& verb : command.commands) {
    out += fmt::format("complete -c {} -n {} {}-a {} -d {}\n", program, fish_quoted(none), where.empty() ? "-f " : "",
                       verb.name, fish_quoted(verb.help));
  }
  for (const Command& verb : command.commands) {
    add(program, verb, (where.empty() ? "" : where + "; and ") + "__fish_seen_subcommand_from " + verb.name, out);
  }
}

}  // namespace

std::string fish_completion(const Command& tree) {
  std::string out = fmt::format("# fish completion for {0}, made by `{0} completion fish`.\n", tree.name);
  add(tree.name, tree, "", out);
  return out;
}

}  // namespace nfp::shell
