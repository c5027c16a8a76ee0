// Cuts a text into the pieces that BPE works in: tokenizer.json's `pre_tokenizer`, a sequence of stages, each of which
// cuts what the one before gave it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "text/regex.h"

namespace nfp::text {

// What becomes of the matches of a Split pattern.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

// GPT-2's pattern, which ByteLevel uses by itself.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Receives the pieces in order. A piece is never empty and lives only during the call.
class PieceSink {
 public:
  virtual ~PieceSink() = default;
  virtual void piece(std::string_view piece) = 0;
};

class PreTokenizer {
 public:
  struct Split {
    Regex pattern;
    SplitBehavior behavior;
    bool invert;  // the gaps are the matches
  };
  struct PrependSpace {};  // before what does not begin with one
  struct Metaspace {       // SentencePiece's way with spaces
    enum Prepend { kNever, kFirst, kAlways };
    std::string replacement;  // stands for a space, "▁"
    Prepend prepend;          // where a replacement is put before a text that does not begin with one
    bool split;               // before each replacement
  };
  using Stage = std::variant<Split, PrependSpace, Metaspace>;

  void add(Stage stage) { stages_.push_back(std::move(stage)); }
  bool empty() const { return stages_.empty(); }
  size_t size() const { return stages_.size(); }

  // `first`: `text` is the beginning of what the user gave, not what follows a special token.
  // Error: a pattern's (regex.h).
  Status run(std::string_view text, bool first, RegexSearch& search, PieceSink& sink) const;

 private:
  Status run_stage(size_t stage, std::string_view text, bool first, RegexSearch& search, PieceSink& sink) const;
  Status run_split(size_t stage, std::string_view text, bool first, RegexSearch& search, PieceSink& sink) const;
  Status run_metaspace(size_t stage, std::string_view text, bool first, RegexSearch& search, PieceSink& sink) const;

  std::vector<Stage> stages_;
};

}  // namespace nfp::text
