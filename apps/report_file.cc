#include "report_file.h"

#include <filesystem>
#include <system_error>
#include <utility>

namespace nfp {

Status check_no_overlap(const std::vector<FlagPath>& outputs, const std::vector<FlagPath>& inputs) {
  namespace fs = std::filesystem;
  std::error_code unknown;
  std::vector<fs::path> places;
  for (const FlagPath& output : outputs) {
    fs::path place;
    if (!output.path.empty() && output_is_replaced(output.path)) {
      for (const FlagPath& input : inputs) {
        if (!input.path.empty() && fs::equivalent(output.path, input.path, unknown))
          return error(ErrorCode::kUsage, "{}: {} is what {} reads, and would be lost; name another file", output.flag,
                       output.path, input.flag);
      }
      // Absolute first: of a relative path without any part that is there yet nothing would be made canonical.
      place = fs::weakly_canonical(fs::absolute(output.path, unknown), unknown);
      for (size_t i = 0; i < places.size(); ++i) {
        if (!place.empty() && places[i] == place)
          return error(ErrorCode::kUsage, "{}: {} is what {} writes, too; name another file", output.flag, output.path,
                       outputs[i].flag);
      }
    }
    places.push_back(std::move(place));
  }
  return ok_status();
}

Result<std::optional<AtomicFile>> open_report(const std::string& path) {
  if (path.empty()) return std::optional<AtomicFile>();
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create_output(path));
  return std::optional<AtomicFile>(std::move(file));
}

Status check_report(const std::string& path) {
  if (path.empty() || !output_is_replaced(path)) return ok_status();
  NFP_RETURN_IF_ERROR(AtomicFile::create_output(path));
  return ok_status();
}

Status write_report(std::optional<AtomicFile>& file, std::string_view text) {
  if (!file) return ok_status();
  NFP_RETURN_IF_ERROR(file->write(text));
  return file->commit();
}

}  // namespace nfp
