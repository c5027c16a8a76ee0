#include "text/pre_tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "text/utf8.h"

namespace nfp::text {
namespace {

struct Range {
  size_t begin;
  size_t end;
};

// Matches and the gaps between them, in order, as part(begin, end, is_match) -> Status. An empty match cuts too, and
// counts where parts are joined; one right after a match is none. (So it is with Oniguruma's find_iter.)
template <typename Part>
Status each_part(const Regex& pattern, std::string_view text, RegexSearch& search, Part&& part) {
  size_t done = 0;
  size_t from = 0;
  std::optional<size_t> last_end;
  while (from <= text.size()) {
    NFP_ASSIGN_OR_RETURN(const RegexSearch::Match match, search.next(pattern, text, from));
    if (!match.found) break;
    const bool is_empty = match.begin == match.end;
    if (!is_empty || last_end != match.end) {
      if (match.begin > done) NFP_RETURN_IF_ERROR(part(done, match.begin, false));
      NFP_RETURN_IF_ERROR(part(match.begin, match.end, true));
      done = match.end;
      last_end = match.end;
    }
    from = match.end;
    if (is_empty) {
      if (from == text.size()) break;
      from += utf8_length(text[from]);
    }
  }
  if (done < text.size()) NFP_RETURN_IF_ERROR(part(done, text.size(), false));
  return ok_status();
}

// The behaviors that join parts. `parts` are (range, is_match).
std::vector<Range> join(const std::vector<std::pair<Range, bool>>& parts, SplitBehavior behavior) {
  std::vector<Range> pieces;
  bool previous = false;
  if (behavior == SplitBehavior::kMergedWithNext) {
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      if (part->second && !previous && !pieces.empty()) {
        pieces.back().begin = part->first.begin;
      } else {
        pieces.push_back(part->first);
      }
      previous = part->second;
    }
    std::reverse(pieces.begin(), pieces.end());
    return pieces;
  }
  for (const auto& [range, is_match] : parts) {
    const bool extend = behavior == SplitBehavior::kContiguous ? is_match == previous : is_match && !previous;
    if (extend && !pieces.empty()) {
      pieces.back().end = range.end;
    } else {
      pieces.push_back(range);
    }
    previous = is_match;
  }
  return pieces;
}

}  // namespace

Status PreTokenizer::run(std::string_view text, bool first, RegexSearch& search, PieceSink& sink) const {
  return run_stage(0, text, first, search, sink);
}

Status PreTokenizer::run_stage(size_t stage, std::string_view text, bool first, RegexSearch& search,
                               PieceSink& sink) const {
  if (text.empty()) return ok_status();
  if (stage == stages_.size()) {
    sink.piece(text);
    return ok_status();
  }
  if (std::holds_alternative<Split>(stages_[stage])) return run_split(stage, text, first, search, sink);
  if (std::holds_alternative<Metaspace>(stages_[stage])) return run_metaspace(stage, text, first, search, sink);
  if (text.front() == ' ') return run_stage(stage + 1, text, first, search, sink);
  return run_stage(stage + 1, " " + std::string(text), first, search, sink);
}

Status PreTokenizer::run_split(size_t stage, std::string_view text, bool first, RegexSearch& search,
                               PieceSink& sink) const {
  const Split& split = std::get<Split>(stages_[stage]);
  const auto pass_on = [&](size_t begin, size_t end) {
    return run_stage(stage + 1, text.substr(begin, end - begin), first && begin == 0, search, sink);
  };
  if (split.behavior == SplitBehavior::kIsolated || split.behavior == SplitBehavior::kRemoved) {
    const bool removes = split.behavior == SplitBehavior::kRemoved;
    return each_part(split.pattern, text, search, [&](size_t begin, size_t end, bool is_match) {
      return removes && is_match != split.invert ? ok_status() : pass_on(begin, end);
    });
  }
  std::vector<std::pair<Range, bool>> parts;
  NFP_RETURN_IF_ERROR(each_part(split.pattern, text, search, [&](size_t begin, size_t end, bool is_match) {
    parts.push_back({{begin, end}, is_match != split.invert});
    return ok_status();
  }));
  for (const Range& piece : join(parts, split.behavior)) NFP_RETURN_IF_ERROR(pass_on(piece.begin, piece.end));
  return ok_status();
}

Status PreTokenizer::run_metaspace(size_t stage, std::string_view text, bool first, RegexSearch& search,
                                   PieceSink& sink) const {
  const Metaspace& metaspace = std::get<Metaspace>(stages_[stage]);
  const std::string& mark = metaspace.replacement;
  std::string marked;
  marked.reserve(text.size() + text.size() / 3 + mark.size());
  const bool prepends = metaspace.prepend == Metaspace::kAlways || (metaspace.prepend == Metaspace::kFirst && first);
  if (prepends && text.front() != ' ' && !text.starts_with(mark)) marked = mark;
  for (const char c : text) c == ' ' ? marked += mark : marked += c;
  if (!metaspace.split) return run_stage(stage + 1, marked, first, search, sink);
  // Each piece begins with a mark.
  const std::string_view view = marked;
  for (size_t begin = 0; begin < view.size();) {
    const size_t end = std::min(view.find(mark, begin + 1), view.size());
    NFP_RETURN_IF_ERROR(run_stage(stage + 1, view.substr(begin, end - begin), first && begin == 0, search, sink));
    begin = end;
  }
  return ok_status();
}

}  // namespace nfp::text
