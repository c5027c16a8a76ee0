// Where a user's files are.
#pragma once

#include <string>

namespace nfp {

// $HOME, or what the system knows of this user where that is not set: services of root have none. Empty: there is none.
std::string home_folder();
// Of a user by name. Empty: the system knows none.
std::string home_folder_of(const std::string& user);
// $XDG_CACHE_HOME/nestedfp, or ~/.cache/nestedfp. Empty: there is neither.
std::string user_cache_folder();

}  // namespace nfp
