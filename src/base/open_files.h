#pragma once

namespace nfp {

// Lets this process open as many files as it may at most: for whoever has a connection, which is one, for each request.
void allow_most_open_files();

}  // namespace nfp
