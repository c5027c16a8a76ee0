#include "shell/command_tree.h"

#include <gtest/gtest.h>

namespace nfp::shell {
namespace {

class Tree : public ::testing::Test {
 protected:
  void SetUp() override {
    CLI::App* run = app_.add_subcommand("run", "Run it: 'now' [maybe]");
    run->footer("Example:\n  prog run x\n.not a macro\n");
    run->add_option("MODEL", text_, "a model")->required();
    run->add_option("-d,--device", text_, "where to run")->check(CLI::IsMember({"auto", "cpu"}))->default_str("auto");
    run->add_option("--threads", number_, "how many")->check(CLI::Range(0, 8))->capture_default_str();
    run->add_option("--stop", list_, "texts");
    run->add_flag("--quiet", flag_, "say nothing");
    run->add_option("--secret", text_, "not for people")->group("");
    run->add_option("--alone", number_, "not with fast")->group("Without a mode");
    CLI::App* fast = run->add_subcommand("fast", "Faster");
    fast->fallthrough();
    fast->add_option("--by", number_, "times");
    fast->add_option("--threads", number_, "how many, faster");
    app_.add_subcommand("hidden", "")->group("");
  }
  CLI::App app_{"A program", "prog"};
  std::string text_;
  int number_ = 3;
  std::vector<std::string> list_;
  bool flag_ = false;
};

const Argument& flag(const Command& command, const std::string& name) {
  for (const Argument& flag : command.flags) {
    if (flag.names.back() == name) return flag;
  }
  ADD_FAILURE() << name << " is not there";
  static const Argument none;
  return none;
}

TEST_F(Tree, TellsWhatTheProgramTakes) {
  const Command tree = command_tree(app_);
  EXPECT_EQ(tree.name, "prog");
  ASSERT_EQ(tree.commands.size(), 1u);
  const Command& run = tree.commands[0];
  EXPECT_EQ(run.name, "run");
  ASSERT_EQ(run.positionals.size(), 1u);
  EXPECT_EQ(run.positionals[0].names, std::vector<std::string>{"MODEL"});
  EXPECT_TRUE(run.positionals[0].required);
  EXPECT_EQ(run.flags.size(), 6u);  // with --help, without --secret
  const Argument& device = flag(run, "--device");
  EXPECT_EQ(device.names, (std::vector<std::string>{"-d", "--device"}));
  EXPECT_EQ(device.choices, (std::vector<std::string>{"auto", "cpu"}));
  EXPECT_EQ(device.preset, "auto");
  EXPECT_EQ(device.value, "TEXT");
  EXPECT_EQ(flag(run, "--threads").range, "0 to 8");
  EXPECT_EQ(flag(run, "--threads").preset, "3");
  EXPECT_TRUE(flag(run, "--stop").repeats);
  EXPECT_FALSE(flag(run, "--threads").repeats);
  EXPECT_EQ(flag(run, "--quiet").value, "");
  EXPECT_TRUE(flag(run, "--quiet").choices.empty());
  ASSERT_EQ(run.commands.size(), 1u);
  EXPECT_EQ(run.commands[0].name, "fast");
  std::vector<std::string> inherited;
  for (const Argument& flag : run.commands[0].inherited) inherited.push_back(flag.names.back());
  EXPECT_EQ(inherited, (std::vector<std::string>{"--device", "--stop", "--quiet"}));
}

TEST_F(Tree, TextThatMeansSomethingToAShellIsQuoted) {
  const Command tree = command_tree(app_);
  EXPECT_NE(zsh_completion(tree).find(R"('run:Run it\: '\''now'\'' \[maybe\]')"), std::string::npos);
  EXPECT_NE(fish_completion(tree).find(R"(-d 'Run it: \'now\' [maybe]')"), std::string::npos);
  const std::string man = man_page(tree, "1.0");
  EXPECT_NE(man.find("\n\\&.not a macro\n"), std::string::npos);
  EXPECT_NE(man.find("\\fB\\-d\\fR, \\fB\\-\\-device\\fR auto|cpu\n"), std::string::npos);
  EXPECT_NE(man.find("How many. 0 to 8. Default: 3."), std::string::npos);
  EXPECT_NE(man.find(".SS prog run fast"), std::string::npos);
  EXPECT_NE(man.find("It also takes, as prog run does, \\fB\\-\\-device\\fR, "), std::string::npos);
  EXPECT_EQ(man.find("secret"), std::string::npos);
  EXPECT_EQ(man.find("hidden"), std::string::npos);
}

}  // namespace
}  // namespace nfp::shell
