// What a program can be told on its command line, read from its CLI11 application: what completions and the manual page
// are made of, so that they know every verb and flag that is there and no other.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace nfp::shell {

struct Argument {
  std::vector<std::string> names;    // "-n", "--max-tokens"; of a positional one only "MODEL"
  std::string value;                 // what follows: "TEXT", "INT"; empty = nothing
  std::vector<std::string> choices;  // where only these may follow
  std::string range;                 // "0 to 1024"; empty = none is known
  std::string preset;                // what it is unless given; empty = not said
  std::string help;
  bool required = false;
  bool repeats = false;  // several values may follow
};

struct Command {
  std::string name;
  std::string help;
  std::string footer;  // examples and notes, in lines
  std::vector<Argument> flags;
  // Of the command above, which may be given here too: those in its default group, where flags fall through to it.
  std::vector<Argument> inherited;
  std::vector<Argument> positionals;
  std::vector<Command> commands;
};

// Without what is hidden (an empty group).
Command command_tree(const CLI::App& app);

// Each returns a script for its shell; the program is called `tree.name`.
std::string bash_completion(const Command& tree);
std::string zsh_completion(const Command& tree);
std::string fish_completion(const Command& tree);

// In man(7)'s macros, section 1.
std::string man_page(const Command& tree, const std::string& version);

}  // namespace nfp::shell
