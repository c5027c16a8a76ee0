// Tools for models whose chat template does not know them: described in words, in the way of Hermes, which is what most
// models have seen most of.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

#include "base/result.h"
#include "text/jinja/chat_template.h"

namespace nfp {

// As the template renders it, with the tools described in the conversation where the template does not know them.
Result<std::string> render_with_tools(const ChatTemplate& chat, ChatTemplateInput input);

// The conversation with the tools described in its system message (or, where the template has none of these, in the
// first message of the user, before all others where there is none), and earlier calls and their results as text.
// Errors: kInvalidInput, for what is no text where a text has to be, by its place.
Result<nlohmann::ordered_json> describe_tools(const nlohmann::ordered_json& messages,
                                              const nlohmann::ordered_json& tools, bool has_system_role);

}  // namespace nfp
