#include "base/control_group.h"

#include <algorithm>

#include "base/mapped_file.h"

namespace nfp {
namespace {

// Whether one of the names between commas is `name`; of version 2 the list is empty.
bool lists_controller(std::string_view list, std::string_view name) {
  if (name.empty()) return list.empty();
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    if (list.substr(at, end - at) == name) return true;
    at = end + 1;
  }
  return false;
}

// From lines such as "4:memory:/user.slice/job", or "0::/user.slice/job". Empty where there is none, and for groups
// outside of what a container sees ("/../job").
std::string group_path(std::string_view text, std::string_view controller) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    at = end + 1;
    const size_t first = line.find(':');
    const size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    if (!lists_controller(line.substr(first + 1, second - first - 1), controller)) continue;
    const std::string_view path = line.substr(second + 1);
    return path.starts_with('/') && path.find("/..") == std::string_view::npos ? std::string(path) : "";
  }
  return "";
}

}  // namespace

std::vector<std::string> control_groups(std::string_view controller, const std::string& root) {
  const Result<std::string> text = read_text_file(root + "/proc/self/cgroup");
  const std::string top = root + "/sys/fs/cgroup" + (controller.empty() ? "" : "/") + std::string(controller);
  std::vector<std::string> folders;
  std::string path = text.ok() ? group_path(*text, controller) : "";
  // A container without a namespace of its own sees its group at the top, and none at `path`.
  for (; path.size() > 1; path.resize(path.rfind('/'))) folders.push_back(top + path);
  folders.push_back(top);
  return folders;
}

}  // namespace nfp
