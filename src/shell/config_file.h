// A verb's flags in a file: `key = value` lines of TOML, where a key is a flag without its dashes.
//
//   model = "org/name"
//   port = 8001
//   deterministic = true
//   allowed-origins = ["https://a.example", "https://b.example"]
//
// CLI11's own reader of such files cuts strings at a # and divides them at spaces, and takes what it does not know for
// nothing, so the reading is ours and strict; CLI11 checks the values as it checks flags.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nfp::shell {

struct ConfigEntry {
  enum class Kind { kString, kNumber, kBoolean, kArray };
  std::string key;  // with '-' for every '_'
  Kind kind = Kind::kString;
  std::vector<std::string> values;  // one, unless an array
  int line = 1;
};

// `name`: the file, for messages. `table`: the one table, [table], that may stand above the keys. What is not strings,
// numbers, booleans and arrays of these is refused, with the line.
Result<std::vector<ConfigEntry>> parse_config_file(std::string_view text, const std::string& name,
                                                   const std::string& table);

// Gives `verb` what the entries say and its command line did not. Every key must be a flag or a positional argument of
// the verb, of a fitting type: errors name file, line and key.
Status apply_config(const std::vector<ConfigEntry>& entries, const std::string& name, CLI::App& verb);

// --config FILE. Throws CLI::ParseError, as CLI11 wants it of what reads a command line.
void add_config_flag(CLI::App& verb);

}  // namespace nfp::shell
