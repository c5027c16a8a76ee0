#include "shell/command_tree.h"

#include <algorithm>
#include <string_view>

namespace nfp::shell {
namespace {

// CLI11 tells choices and ranges only in the type's text: "TEXT:{auto,cpu}", "INT:INT in [0 - 8]".
void read_type(const std::string& type, Argument& out) {
  out.value = type.substr(0, type.find_first_of(":[ "));
  const size_t open = type.find('{'), close = type.find('}');
  if (open != std::string::npos && close != std::string::npos && open < close) {
    std::string_view list(type.data() + open + 1, close - open - 1);
    while (!list.empty()) {
      const size_t comma = list.find(',');
      out.choices.emplace_back(list.substr(0, comma));
      list.remove_prefix(comma == std::string_view::npos ? list.size() : comma + 1);
    }
    return;
  }
  const size_t begin = type.find(" in ["), end = type.rfind(']'), dash = type.find(" - ");
  if (begin != std::string::npos && dash != std::string::npos && end != std::string::npos && dash < end) {
    out.range = type.substr(begin + 5, dash - begin - 5) + " to " + type.substr(dash + 3, end - dash - 3);
  }
}

Argument read_option(const CLI::Option& option) {
  Argument out;
  if (option.get_positional() && !option.nonpositional()) {
    out.names = {option.get_name(true)};
  } else {
    for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  }
  out.help = option.get_description();
  out.required = option.get_required();
  out.preset = option.get_default_str();
  if (option.get_items_expected_max() > 0) {
    read_type(option.get_type_name(), out);
    out.repeats = option.get_items_expected_max() > 1;
  }
  return out;
}

std::vector<Argument> inherited_by(const Command& command, const CLI::App& above) {
  std::vector<Argument> out;
  for (const CLI::Option* option : above.get_options()) {
    if (!option->nonpositional() || option->get_group() != CLI::OptionDefaults().get_group()) continue;
    Argument flag = read_option(*option);
    const auto same = [&](const Argument& own) { return own.names.back() == flag.names.back(); };
    if (std::none_of(command.flags.begin(), command.flags.end(), same)) out.push_back(std::move(flag));
  }
  return out;
}

}  // namespace

Command command_tree(const CLI::App& app) {
  Command out;
  out.name = app.get_name();
  out.help = app.get_description();
  out.footer = app.get_footer();
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    Argument argument = read_option(*option);
    (option->nonpositional() ? out.flags : out.positionals).push_back(std::move(argument));
  }
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_group().empty()) continue;
    Command& inner = out.commands.emplace_back(command_tree(*verb));
    if (verb->get_fallthrough()) inner.inherited = inherited_by(inner, app);
  }
  return out;
}

}  // namespace nfp::shell
