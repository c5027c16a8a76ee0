// Grammars run in processes of their own. xgrammar can neither be interrupted nor bounded, and a grammar from outside
// may cost any time, memory and stack, in compiling as well as for any token. A process can be stopped at any moment:
//
//   the server ── the first process (the program, started again: it has no threads and nothing of the server's; makes
//   the next one, again if it ends)
//                   └─ one that holds the vocabulary
//                        └─ one for each grammar: compiles it, then waits to be copied
//                             └─ one for each answer: accepts its tokens and computes the masks
//
// Each further one is a fork of its parent, which has one thread then, and shares its pages. Every process ends when
// the server's end of its socket closes, also in the middle of work, and stops itself where its time is up. None needs
// its parent to live on.
#pragma once

namespace nfp::server {

// The first process, until its `channel`, descriptor 3, closes. Never returns.
[[noreturn]] void grammar_worker_main(int channel);

}  // namespace nfp::server
