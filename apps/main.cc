// The nestedfp program: one verb, one file.
#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "base/log.h"
#include "base/mapping_guard.h"
#include "number_checks.h"
#include "server/grammar/grammar.h"
#include "verbs.h"

namespace {

int exit_code(const nfp::Error& error) {
  if (error.code == nfp::ErrorCode::kCancelled) return 130;  // as a shell reports what Ctrl-C ended
  return error.code == nfp::ErrorCode::kUsage ? 2 : 1;
}

// A file that is opened while standard output or error is closed would get its number, and with it what is printed.
// What stands there instead of standard output takes nothing, so that its loss is still told.
void fill_standard_files() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// Where a positional argument is missing: the flag before it that took it for one of its values, if any.
std::string taken_by_a_list(const CLI::App& verb) {
  const auto options = verb.get_options();
  const bool missing = std::any_of(options.begin(), options.end(), [](const CLI::Option* option) {
    return option->get_positional() && option->get_required() && option->count() == 0;
  });
  for (const CLI::Option* option : options) {
    if (!missing || !option->nonpositional() || option->results().size() < 2) continue;
    return fmt::format("; {} takes several values, also '{}': name the former before it", option->get_name(),
                       option->results().back());
  }
  return "";
}

int finish(const nfp::Status& status) {
  if (status.ok()) {
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
    nfp::log::say("nestedfp: error: standard output: cannot be written, so some of it is lost\n");
    return 1;
  }
  // Nothing is to be said of what was stopped after it had given its answer.
  if (!status.error().message.empty())
    nfp::log::say("nestedfp: error: {}\n", nfp::log::without_controls(status.error().message));
  return exit_code(status.error());
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_files();
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond the limit of its size (ulimit -f) is an error like a full disk
  nfp::server::run_as_grammar_process(argc, argv);
  nfp::install_mapping_guard();
  CLI::App app(
      "nestedfp: one 16-bit copy of a language model's weights, run in exact FP16 or in FP8, step by step.\n"
      "`nestedfp VERB --help` explains a verb and shows examples.",
      "nestedfp");
  app.set_version_flag("--version", NFP_VERSION);
  app.require_subcommand(1);
  nfp::Status status;
  nfp::add_generate(app, status);
  nfp::add_chat(app, status);
  nfp::add_convert(app, status);
  nfp::add_restore(app, status);
  nfp::add_inspect(app, status);
  nfp::add_perplexity(app, status);
  nfp::add_bench(app, status);
  nfp::add_serve(app, status);
  nfp::add_replay(app, status);
  nfp::add_evaluate(app, status);
  nfp::add_tune(app, status);
  nfp::add_pull(app, status);
  nfp::add_models(app, status);
  nfp::add_doctor(app, status);
  nfp::add_completion(app, status);
  nfp::check_numbers(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (const auto unknown = app.remaining(); app.get_subcommands().empty() && !unknown.empty()) {
      nfp::log::say("nestedfp: error: {}: no such verb or flag; `nestedfp --help` lists them\n", unknown.front());
      return 2;
    }
    if (error.get_exit_code() == 0) {  // --help and --version
      app.exit(error);
      return finish(status);
    }
    if (argc < 2) {
      nfp::log::say("nestedfp: error: name a verb, such as `nestedfp chat MODEL`; `nestedfp --help` lists them\n");
      return 2;
    }
    std::string verb = "nestedfp";
    const CLI::App* at = &app;
    while (!at->get_subcommands().empty()) {
      at = at->get_subcommands().front();
      verb += " " + at->get_name();
    }
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {  // whose own text has them backwards
      nfp::log::say("nestedfp: error: {}: not expected here; `{} --help` lists what is\n",
                    nfp::log::without_controls(fmt::format("{}", fmt::join(app.remaining(true), " "))), verb);
    } else {
      const bool required = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
      nfp::log::say("nestedfp: error: {} (see `{} --help`)\n",
                    nfp::log::without_controls(error.what() + (required ? taken_by_a_list(*at) : "")), verb);
    }
    return 2;
  } catch (const std::bad_alloc&) {
    nfp::log::say("nestedfp: error: there is not enough memory; use a smaller model, context or batch\n");
    return 1;
  } catch (const std::exception& failed) {
    if (std::ferror(stdout) != 0) return finish(status);  // what printed to it found that out
    // None should come this far but those of threads; on its way temporary files were removed.
    const auto* const refused = dynamic_cast<const std::system_error*>(&failed);
    const bool no_thread = refused != nullptr && refused->code() == std::errc::resource_unavailable_try_again;
    nfp::log::say("nestedfp: error: {}{}{}\n", no_thread ? "cannot start a thread: " : "", failed.what(),
                  no_thread ? "; allow more (ulimit -u and -v, a container's limit of processes)" : "");
    return 1;
  }
  return finish(status);
}
