// nestedfp completion, and the hidden nestedfp man-page: what the shell and man(1) know of the program.
#include <fmt/format.h>

#include <memory>

#include "shell/command_tree.h"
#include "verbs.h"

namespace nfp {

void add_completion(CLI::App& app, Status& status) {
  auto shell = std::make_shared<std::string>();
  CLI::App* verb = app.add_subcommand("completion", "Print a shell's completions of this program");
  verb->footer(
      "Packages install them. Without one, in bash:  source <(nestedfp completion bash)\n"
      "zsh:   source <(nestedfp completion zsh)\n"
      "fish:  nestedfp completion fish | source");
  verb->add_option("SHELL", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  verb->callback([shell, &app, &status] {
    status = ok_status();
    const shell::Command tree = shell::command_tree(app);
    fmt::print("{}", *shell == "bash"  ? shell::bash_completion(tree)
                     : *shell == "zsh" ? shell::zsh_completion(tree)
                                       : shell::fish_completion(tree));
  });
  CLI::App* page = app.add_subcommand("man-page", "Print the manual page (man(7) macros)")->group("");
  page->callback([&app, &status] {
    status = ok_status();
    fmt::print("{}", shell::man_page(shell::command_tree(app), NFP_VERSION));
  });
}

}  // namespace nfp
