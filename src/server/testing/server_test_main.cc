// gtest's main() for tests that compile grammars.
#include <gtest/gtest.h>

#include "server/grammar/grammar.h"

int main(int argc, char** argv) {
  nfp::server::run_as_grammar_process(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
