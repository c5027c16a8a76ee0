#include "text/stop_filter.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace nfp {
namespace {

struct Outcome {
  std::string text;
  bool stopped;
  std::string stop;
  bool operator==(const Outcome&) const = default;
};

Outcome run(const std::vector<std::string>& stops, const std::vector<std::string>& parts, bool include = false) {
  StopFilter filter(stops, include);
  Outcome outcome;
  for (const std::string& part : parts) outcome.text += filter.feed(part);
  outcome.text += filter.finish();
  outcome.stopped = filter.stopped();
  if (outcome.stopped) outcome.stop = filter.stop();
  return outcome;
}

TEST(StopFilter, CutsAtTheStopString) {
  EXPECT_EQ(run({"END"}, {"abcENDdef"}), (Outcome{"abc", true, "END"}));
  EXPECT_EQ(run({"END"}, {"abcE", "N", "Ddef", "more"}), (Outcome{"abc", true, "END"}));
  EXPECT_EQ(run({"END"}, {"abcE", "N", "D"}, true), (Outcome{"abcEND", true, "END"}));
  EXPECT_EQ(run({"END"}, {"abcEN"}), (Outcome{"abcEN", false, ""}));
  EXPECT_EQ(run({}, {"abc"}), (Outcome{"abc", false, ""}));
  EXPECT_EQ(run({""}, {"abc"}), (Outcome{"abc", false, ""}));
}

TEST(StopFilter, HoldsBackOnlyWhatMayBecomeAStop) {
  StopFilter filter({"\n\nUser:"});
  EXPECT_EQ(filter.feed("Hi\n"), "Hi");
  EXPECT_EQ(filter.feed("x\n"), "\nx");
  EXPECT_EQ(filter.feed("\n\nUse"), "\n");
  EXPECT_EQ(filter.feed("r"), "");
  EXPECT_FALSE(filter.stopped());
  EXPECT_EQ(filter.feed(":"), "");
  EXPECT_TRUE(filter.stopped());
  EXPECT_EQ(filter.feed("rest"), "");
}

TEST(StopFilter, TheFirstToBeCompleteWins) {
  EXPECT_EQ(run({"bcd", "c"}, {"abcd"}), (Outcome{"ab", true, "c"}));
  EXPECT_EQ(run({"c", "abc"}, {"xabc"}), (Outcome{"x", true, "abc"}));
}

TEST(StopFilter, WhatIsCompleteTooEarlyDoesNotCountAndWhatBeginsThereDoes) {
  StopFilter filter({"END", "aa"});
  EXPECT_EQ(filter.feed("xEND", false), "xEND");
  EXPECT_EQ(filter.feed("aa", false), "a");
  EXPECT_EQ(filter.feed("bEN", false), "ab");
  EXPECT_EQ(filter.feed("Dx"), "");
  ASSERT_TRUE(filter.stopped());
  EXPECT_EQ(filter.stop(), "END");

  StopFilter border({"aa"});
  EXPECT_EQ(border.feed("aa", false), "a");
  EXPECT_EQ(border.feed("a"), "");  // its last two, of which one came too early
  EXPECT_TRUE(border.stopped());
}

// Against a search in the whole text, however it is cut.
TEST(StopFilter, EqualsASearchInTheWholeText) {
  std::mt19937 random(3);
  const auto word = [&](unsigned most) {
    std::string text;
    for (unsigned i = 1 + random() % most; i > 0; --i) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (unsigned i = 1 + random() % 3; i > 0; --i) stops.push_back(word(7));
    const std::string text = word(30);
    Outcome expected{text, false, ""};
    for (size_t end = 1; end <= text.size() && !expected.stopped; ++end) {
      for (const std::string& stop : stops) {
        if (text.substr(0, end).ends_with(stop) && stop.size() > expected.stop.size()) {
          expected = {text.substr(0, end - stop.size()), true, stop};
        }
      }
    }
    std::vector<std::string> parts;
    for (size_t at = 0; at < text.size();) {
      const size_t size = random() % 5;
      parts.push_back(text.substr(at, size));
      at += size;
    }
    ASSERT_EQ(run(stops, parts), expected) << text;
  }
}

}  // namespace
}  // namespace nfp
