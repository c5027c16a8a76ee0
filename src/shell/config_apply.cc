#include <algorithm>

#include "base/mapped_file.h"
#include "shell/config_file.h"

namespace nfp::shell {
namespace {

CLI::Option* find_option(CLI::App& verb, const std::string& key) {
  for (CLI::Option* option : verb.get_options([](const CLI::Option*) { return true; })) {
    if (option->nonpositional()) {
      const auto& names = option->get_lnames();
      if (std::find(names.begin(), names.end(), key) != names.end()) return option;
    } else if (CLI::detail::to_lower(option->get_name(true)) == key) {
      return option;
    }
  }
  return nullptr;
}

Status apply(const ConfigEntry& entry, const std::string& place, CLI::App& verb) {
  CLI::Option* option = find_option(verb, entry.key);
  if (option == nullptr || !option->get_configurable()) {
    return error(ErrorCode::kUsage, "{}: there is no key '{}'; keys are the flags of `{} --help` without their dashes",
                 place, entry.key, verb.get_name());
  }
  const bool flag = option->get_items_expected_max() == 0;
  if (flag != (entry.kind == ConfigEntry::Kind::kBoolean)) {
    return error(ErrorCode::kUsage, "{}: '{}' {}", place, entry.key,
                 flag ? "is true or false" : "is not true or false");
  }
  if (entry.kind == ConfigEntry::Kind::kArray && option->get_items_expected_max() == 1) {
    return error(ErrorCode::kUsage, "{}: '{}' takes one value, not a list", place, entry.key);
  }
  // What the command line says goes before, and a false flag is one that is not given.
  if (!option->empty() || entry.values.empty() || (flag && entry.values.front() == "false")) return ok_status();
  try {
    option->add_result(entry.values);
    option->run_callback();
  } catch (const CLI::Error& problem) {
    return error(ErrorCode::kUsage, "{}: '{}': {}", place, entry.key, problem.what());
  }
  return ok_status();
}

}  // namespace

Status apply_config(const std::vector<ConfigEntry>& entries, const std::string& name, CLI::App& verb) {
  for (const ConfigEntry& entry : entries) {
    NFP_RETURN_IF_ERROR(apply(entry, fmt::format("{}:{}", name, entry.line), verb));
  }
  return ok_status();
}

void add_config_flag(CLI::App& verb) {
  verb.add_option_function<std::string>(
          "--config",
          [&verb](const std::string& path) {
            Status status;
            if (const auto text = read_text_file(path, size_t{1} << 20); !text.ok()) {
              status = error(ErrorCode::kUsage, "--config: {}", text.error().message);
            } else if (const auto entries = parse_config_file(*text, path, verb.get_name()); !entries.ok()) {
              status = entries.error();
            } else {
              status = apply_config(*entries, path, verb);
            }
            if (!status.ok()) throw CLI::ParseError(status.error().message, CLI::ExitCodes::ConfigError);
          },
          "a TOML file with flags, without their dashes, and MODEL; flags given beside it override it")
      ->configurable(false);
}

}  // namespace nfp::shell
