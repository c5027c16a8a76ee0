// What string methods and filters share: splitting, stripping, replacing, padding. Texts are valid UTF-8.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/runtime.h"

namespace nfp::jinja {

// str.split(separator, limit), from the right for rsplit; limit < 0 means all. Precondition: separator not empty.
std::vector<std::string_view> split(Runtime& rt, std::string_view text, std::string_view separator, Int limit,
                                    bool from_right);
std::vector<std::string_view> split_space(Runtime& rt, std::string_view text, Int limit, bool from_right);
std::vector<std::string_view> split_lines(Runtime& rt, std::string_view text, bool keep_ends);

// str.strip: the code points of *set, or white space when set is null.
std::string_view strip(Runtime& rt, std::string_view text, const std::string_view* set, bool left, bool right);
std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int limit);
// `left` and `right` copies of fill around the text.
std::string pad(Runtime& rt, std::string_view text, Int left, Int right, std::string_view fill);

bool is_lower_text(std::string_view text);  // str.islower
bool is_upper_text(std::string_view text);

}  // namespace nfp::jinja
