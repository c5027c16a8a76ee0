#include "report_file.h"

#include <utility>

namespace nfp {

Result<std::optional<AtomicFile>> open_report(const std::string& path) {
  if (path.empty()) return std::optional<AtomicFile>();
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create_output(path));
  return std::optional<AtomicFile>(std::move(file));
}

Status write_report(std::optional<AtomicFile>& file, std::string_view text) {
  if (!file) return ok_status();
  NFP_RETURN_IF_ERROR(file->write(text));
  return file->commit();
}

}  // namespace nfp
