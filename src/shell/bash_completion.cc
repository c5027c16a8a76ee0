#include <fmt/format.h>
#include <fmt/ranges.h>

#include "shell/command_tree.h"

namespace nfp::shell {
namespace {

struct Tables {
  std::string steps;   // which words lead from a path to a longer one
  std::string values;  // what may follow a flag
  std::string words;   // flags and verbs of a path
};

void add(const Command& command, const std::string& path, Tables& tables) {
  std::string free_values;
  std::vector<std::string> flags, verbs;
  std::vector<Argument> taken = command.flags;
  taken.insert(taken.end(), command.inherited.begin(), command.inherited.end());
  for (const Argument& flag : taken) {
    std::string pattern;
    for (const std::string& name : flag.names) {
      flags.push_back(name);
      pattern += fmt::format("{}'{} {}'", pattern.empty() ? "" : " | ", path, name);
    }
    if (!flag.choices.empty()) {
      tables.values += fmt::format("    {}) values='{}' ;;\n", pattern, fmt::join(flag.choices, " "));
    } else if (!flag.value.empty()) {
      free_values += (free_values.empty() ? "" : " | ") + pattern;
    }
  }
  // What has no list of values may name a file.
  if (!free_values.empty()) tables.values += fmt::format("    {}) files=1 ;;\n", free_values);
  for (const Command& verb : command.commands) {
    verbs.push_back(verb.name);
    tables.steps += fmt::format("      '{} {}') path='{}' ;;\n", path, verb.name,
                                path.empty() ? verb.name : path + " " + verb.name);
  }
  // A positional argument is one of its choices (SHELL), or a file or model.
  bool models = false;
  for (const Argument& positional : command.positionals) {
    models = models || positional.choices.empty();
    verbs.insert(verbs.end(), positional.choices.begin(), positional.choices.end());
  }
  tables.words += fmt::format("    '{}') flags='{}' verbs='{}' models={} ;;\n", path, fmt::join(flags, " "),
                              fmt::join(verbs, " "), models ? 1 : 0);
  for (const Command& verb : command.commands) add(verb, path.empty() ? verb.name : path + " " + verb.name, tables);
}

}  // namespace

std::string bash_completion(const Command& tree) {
  Tables tables;
  add(tree, "", tables);
  return fmt::format(
      R"sh(# bash completion for {0}, made by `{0} completion bash`.
_{0}() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} path='' values='' files=0 flags='' verbs='' models=0 i
  local word=${{COMP_LINE:0:COMP_POINT}}
  # Bash gives --flag=value as three words, and divides org/name@REVISION:FILE likewise: `word` is the whole of it, of
  # which $2 is what a reply takes the place of.
  if [[ $cur == [=:@] ]]; then
    cur=''
  elif [[ $prev == '=' ]]; then
    prev=${{COMP_WORDS[COMP_CWORD - 2]}}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$path ${{COMP_WORDS[i]}}" in
{1}    esac
  done
  word=${{word##*[[:space:]]}}
  [[ $word == *"${{2-$cur}}" ]] || word=$cur
  COMPREPLY=()
  case "$path $prev" in
{2}  esac
  if [[ -n $values ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
    return
  fi
  if ((files)); then
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    return
  fi
  case "$path" in
{3}  esac
  if [[ $cur == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
    return
  fi
  mapfile -t COMPREPLY < <(
    compgen -W "$verbs" -- "$cur"
    if ((models)); then
      while IFS= read -r; do printf '%s\n' "${{REPLY#"${{word%"${{2-$cur}}"}}"}}"; done < <(
        compgen -f -- "$word"
        compgen -W "$("${{COMP_WORDS[0]}}" models --names 2>/dev/null)" -- "$word")
    fi
  )
  if ((models)); then compopt -o filenames 2>/dev/null; fi
}}
complete -F _{0} {0}
)sh",
      tree.name, tables.steps, tables.values, tables.words);
}

}  // namespace nfp::shell
