// The name that a file or directory has until it is complete. All of a process's are known, so that one that is told to
// stop can leave nothing half-written behind.
#pragma once

#include <functional>
#include <string>

namespace nfp {

class TemporaryPath {
 public:
  TemporaryPath() = default;
  // For what others make under that name (a library, say).
  explicit TemporaryPath(std::string path);
  // Makes it, too; its name is empty where `make` says that it did not. A stop comes before or after both: whoever
  // waits for the file to appear and then stops the process finds nothing of it.
  TemporaryPath(std::string path, const std::function<bool(const std::string&)>& make);
  // Removes what is there, a directory with all that it holds.
  ~TemporaryPath();
  TemporaryPath(TemporaryPath&& other) noexcept;
  TemporaryPath& operator=(TemporaryPath&& other) noexcept;
  TemporaryPath(const TemporaryPath&) = delete;
  TemporaryPath& operator=(const TemporaryPath&) = delete;

  const std::string& name() const { return name_; }  // empty: none
  // It has another name now, or was never made: there is nothing to remove.
  void release();

 private:
  std::string name_;
};

// A new name beside `path`: its own and ".tmp-", the process and 16 random hexadecimal digits. Of a name so long that
// no file system would take it with these, only the beginning.
std::string temporary_beside(const std::string& path);

// Tells, once, of temporaries of the output `path` that processes left which were killed: they may be as large as what
// was to be written. They stay: whose they are is for a person to say.
void warn_of_leftovers(const std::string& path);

// Removes what all of them name. From then on whoever would make or end one waits: only for the way out of the process.
void remove_all_temporaries();

}  // namespace nfp
