#include <fmt/format.h>

#include <array>
#include <utility>

#include "shell/command_tree.h"

namespace nfp::shell {
namespace {

constexpr std::pair<const char*, const char*> kEnvironment[] = {
    {"CUDA_VISIBLE_DEVICES", "Which GPUs there are for nestedfp; the first of them computes."},
    {"NESTEDFP_API_KEY", "Keys that clients of serve must send, with commas."},
    {"NESTEDFP_CPU",
     "CPU kernels to use instead of the best: scalar, avx2, avx512, avx512gfni, avx512bf16, avx512fp16 or amx."},
    {"HF_HOME, HF_HUB_CACHE",
     "Where models are kept and looked for; by default ~/.cache/huggingface and its folder hub."},
    {"HF_TOKEN, HUGGING_FACE_HUB_TOKEN, HF_TOKEN_PATH",
     "The token that pull reads gated and private models with, or the file that holds it; by default HF_HOME/token."},
    {"HF_ENDPOINT", "Another hub than https://huggingface.co."},
    {"HF_HUB_OFFLINE", "1: pull is refused."},
    {"SSL_CERT_FILE", "Certificates that pull trusts instead of the system's."},
    {"https_proxy, no_proxy", "The proxy that pull goes through, and for which hosts it does not."},
    {"XDG_CACHE_HOME",
     "The user's cache, ~/.cache by default: calibrations and step times are kept in its folder nestedfp, models in "
     "huggingface."},
    {"TMPDIR", "Where evaluate keeps FP16's distributions while it runs, unless --scratch names a folder; else /tmp."},
    {"NO_COLOR", "Set and not empty: generate --switch-every marks precisions without colours."},
    {"HOME", "The user's folder."},
};

constexpr std::pair<const char*, const char*> kExit[] = {
    {"0", "All went well."},
    {"1", "It failed; the last line on standard error says why and what to do."},
    {"2", "The command line, the configuration file or the environment is wrong."},
    {"130", "It was interrupted."},
};

// Text in a roff line: a backslash, a quote and a dot that begins a line mean something there, and a plain - is a
// hyphen, which cannot be searched for or copied.
std::string roff(const std::string& text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    line_begins = c == '\n';
  }
  return out;
}

std::string capitalised(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z' && text.find('=') == std::string::npos &&
      text.substr(0, text.find(' ')).find(':') == std::string::npos) {
    text[0] = static_cast<char>(text[0] - 'a' + 'A');
  }
  return text;
}

std::string placeholder(const Argument& argument) {
  if (argument.choices.empty()) return "\\fI" + roff(argument.value) + "\\fR";
  std::string out;
  for (const std::string& choice : argument.choices) out += (out.empty() ? "" : "|") + roff(choice);
  return out;
}

void add_flag(const Argument& flag, std::string& out) {
  out += ".TP\n";
  std::string names;
  for (const std::string& name : flag.names) names += (names.empty() ? "" : ", ") + ("\\fB" + roff(name) + "\\fR");
  out += names + (flag.value.empty() ? "" : " " + placeholder(flag)) + (flag.repeats ? " ..." : "") + "\n";
  out += roff(capitalised(flag.help)) + ".";
  if (!flag.range.empty()) out += roff(" " + flag.range + ".");
  if (!flag.preset.empty() && !flag.value.empty()) out += roff(" Default: " + flag.preset + ".");
  out += "\n";
}

void add_verb(const std::string& program, const Command& verb, std::string& out) {
  const std::string full = program + " " + verb.name;
  out += fmt::format(".SS {}", roff(full));
  for (const Argument& positional : verb.positionals) {
    out += roff(positional.required ? " " + positional.names.front() : " [" + positional.names.front() + "]");
  }
  out += fmt::format("\n{}.\n", roff(verb.help));
  for (const Argument& positional : verb.positionals) {
    out += fmt::format(".TP\n\\fI{}\\fR\n{}.\n", roff(positional.names.front()), roff(capitalised(positional.help)));
  }
  for (const Argument& flag : verb.flags) {
    if (flag.names.back() != "--help") add_flag(flag, out);
  }
  if (!verb.inherited.empty()) {
    std::string names;
    for (const Argument& flag : verb.inherited) {
      names += (names.empty() ? "" : ", ") + ("\\fB" + roff(flag.names.back()) + "\\fR");
    }
    out += fmt::format(".PP\nIt also takes, as {} does, {}.\n", roff(program), names);
  }
  if (!verb.footer.empty())
    out += ".PP\n.nf\n" + roff(verb.footer) + (verb.footer.ends_with('\n') ? "" : "\n") + ".fi\n";
  for (const Command& inner : verb.commands) add_verb(full, inner, out);
}

}  // namespace

std::string man_page(const Command& tree, const std::string& version) {
  std::string upper;
  for (const char c : tree.name) upper += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  // A date would make two builds of one source differ.
  std::string out = fmt::format(".TH {} 1 \"\" \"{} {}\" \"User Commands\"\n", upper, tree.name, version);
  out += fmt::format(".SH NAME\n{} \\- language models in FP16 or FP8 from one copy of the weights\n", tree.name);
  out += fmt::format(".SH SYNOPSIS\n.B {}\n.I VERB\n[\\fIarguments\\fR]\n", tree.name);
  out += ".SH DESCRIPTION\n" + roff(tree.help) + "\n";
  out += ".SH OPTIONS\n";
  for (const Argument& flag : tree.flags) add_flag(flag, out);
  out += ".SH VERBS\nEvery verb also takes \\fB\\-h\\fR, \\fB\\-\\-help\\fR.\n";
  for (const Command& verb : tree.commands) add_verb(tree.name, verb, out);
  out += ".SH ENVIRONMENT\n";
  for (const auto& [name, meaning] : kEnvironment) out += fmt::format(".TP\n.B {}\n{}\n", name, roff(meaning));
  out += ".SH EXIT STATUS\n";
  for (const auto& [code, meaning] : kExit) out += fmt::format(".TP\n.B {}\n{}\n", code, roff(meaning));
  return out;
}

}  // namespace nfp::shell
