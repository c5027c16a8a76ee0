// Tools for models whose chat template does not know them: described in words, in the way of Hermes, which is what most
// models have seen most of.
#pragma once

#include <string_view>

#include "server/api/json_text.h"

namespace nfp::server {

// The conversation with the tools described in its system message (or, where the template has none of these, in the
// first message of the user, before all others where there is none), and earlier calls and their results as text.
Json describe_tools(const Json& messages, const Json& tools, bool has_system_role);

// Whether what a template made of such a conversation has the tools in it.
bool shows_tools(std::string_view prompt);

}  // namespace nfp::server
