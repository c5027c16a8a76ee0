// Grammars run in processes of their own. xgrammar can neither be interrupted nor bounded, and a grammar from outside
// may cost any time, memory and stack, in compiling as well as for any token. A process can be stopped at any moment:
//
//   the server ── the first process (forked before the server has threads and a model; makes the next one, again if it
//   ends)
//                   └─ one that holds the vocabulary
//                        └─ one for each grammar: compiles it, then waits to be copied
//                             └─ one for each answer: accepts its tokens and computes the masks
//
// Each copy is a fork and shares its parent's pages. Every process ends when the server's end of its socket closes,
// also in the middle of work, and stops itself where its time is up. None needs its parent to live on.
#pragma once

namespace nfp::server {

// The first process, until its `channel` closes. Never returns.
[[noreturn]] void grammar_worker_main(int channel);

}  // namespace nfp::server
