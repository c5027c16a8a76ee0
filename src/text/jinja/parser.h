// Template text -> Template.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "text/jinja/ast.h"

namespace nfp::jinja {

// Errors name the template and the line.
Result<std::shared_ptr<const Template>> parse_template(const std::string& source, std::string name);

}  // namespace nfp::jinja
