// For programs that are built with ThreadSanitizer. Include once, in the file that has main() or tests.
#pragma once

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NFP_THREAD_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) && !defined(NFP_THREAD_SANITIZER)
#define NFP_THREAD_SANITIZER 1
#endif

#ifdef NFP_THREAD_SANITIZER
// Where all processes for grammars were killed, a copy of a program that has threads starts them again, and they start
// a thread for each grammar.
extern "C" const char* __tsan_default_options();  // NOLINT(bugprone-reserved-identifier)
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif
