// What happens when a mapped file gets shorter while it is read: the kernel raises SIGBUS, which by default ends the
// process without a word.
#pragma once

#include <cstddef>
#include <string>

namespace nfp {

// Makes SIGBUS inside a registered mapping end the process with exit code 1, one line on stderr that names the file,
// and no temporaries left; any other SIGBUS stays fatal as before. For a program's main(); call it once.
void install_mapping_guard();

// Called by MappedFile. Beyond a fixed number of mappings at a time files are not recorded, which costs the file's name
// in the message and nothing else.
void guard_mapping(const void* begin, size_t bytes, const std::string& path);
void unguard_mapping(const void* begin);

}  // namespace nfp
