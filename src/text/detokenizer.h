// Turns a stream of token ids into a stream of text. What is emitted, put together, is Tokenizer::decode of all ids;
// each emitted part is valid UTF-8 by itself: the first bytes of an unfinished sequence wait for the rest.
//
//   StreamingDetokenizer stream(tokenizer);
//   std::string text = stream.append(id);   // may be empty
//   text += stream.finish();                // what was still held back
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "text/tokenizer.h"

namespace nfp {

struct DetokenizerOptions {
  bool skip_special = true;
  // The ids go on from a text that is already there, so SentencePiece's leading space is a space between words and
  // stays. False: the ids are a whole text.
  bool continues = true;
};

class StreamingDetokenizer {
 public:
  explicit StreamingDetokenizer(std::shared_ptr<const Tokenizer> tokenizer, DetokenizerOptions options = {});

  // The text that this token completes. Bytes that can no longer become UTF-8 come out as U+FFFD, one for each maximal
  // ill-formed part (Unicode 15, section 3.9, table 3-8), as from_utf8_lossy does. For byte-fallback tokens
  // (SentencePiece) decode gives one U+FFFD for each byte of a run that is not UTF-8 as a whole; a stream, which cannot
  // take back what it has shown, gives them for the ill-formed bytes of the run alone.
  std::string append(int32_t id);
  // Ends the text: an unfinished sequence becomes U+FFFD, or is left out. The object then starts anew.
  std::string finish(bool drop_unfinished = false);
  // Whether the last token ended within a character.
  bool within_character() const { return !pending_.empty(); }

 private:
  void flush_complete(std::string& out);
  void flush_rest(std::string& out);

  std::shared_ptr<const Tokenizer> tokenizer_;
  DetokenizerOptions options_;
  std::string pending_;            // bytes not yet emitted: the beginning of one UTF-8 sequence
  bool pending_fallback_ = false;  // they came from byte-fallback tokens
  bool at_start_ = true;
};

}  // namespace nfp
