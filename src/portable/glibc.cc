// What code compiled against a newer glibc asks of it, made of what glibc 2.28 has. These definitions are linked before
// libc and hidden, so that all objects of a program or library use them, archives of the distribution too.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "portable/cond_wait.h"

// Forwarding is by a jump and no call: dlopen() and dlsym() look at who called them.
asm(R"(
  .macro nfp_forward name:req, to:req
    .section .text.\name, "ax", @progbits
    .globl \name
    .hidden \name
    .type \name, @function
    \name\():
      endbr64
      jmp *\to\()@GOTPCREL(%rip)
    .size \name, . - \name
  .endm
  .macro nfp_old version:req, names:vararg
    .irp name, \names
      .symver nfp_old_\name, \name\()@\version
      nfp_forward \name, nfp_old_\name
    .endr
  .endm
  .pushsection .text

  # Their new versions (glibc 2.29; 2.38) differ in errno alone.
  nfp_old GLIBC_2.2.5, exp, exp2, log, log2, pow, fmod, fmodf

  # From libpthread, libdl and librt into libc (glibc 2.32, 2.34).
  nfp_old GLIBC_2.2.5, __pthread_key_create, pthread_key_create, pthread_key_delete
  nfp_old GLIBC_2.2.5, pthread_getspecific, pthread_setspecific
  nfp_old GLIBC_2.2.5, pthread_create, pthread_detach, pthread_join, pthread_kill, pthread_once, pthread_sigmask
  nfp_old GLIBC_2.3.4, pthread_getaffinity_np, pthread_setaffinity_np
  nfp_old GLIBC_2.2.5, pthread_condattr_setpshared
  nfp_old GLIBC_2.3.3, pthread_condattr_setclock
  nfp_old GLIBC_2.2.5, pthread_mutex_trylock, pthread_mutexattr_init, pthread_mutexattr_destroy
  nfp_old GLIBC_2.2.5, pthread_mutexattr_setpshared, pthread_mutexattr_settype
  nfp_old GLIBC_2.2.5, pthread_rwlock_init, pthread_rwlock_destroy, pthread_rwlock_unlock
  nfp_old GLIBC_2.2.5, pthread_rwlock_rdlock, pthread_rwlock_timedrdlock, pthread_rwlock_tryrdlock
  nfp_old GLIBC_2.2.5, pthread_rwlock_wrlock, pthread_rwlock_timedwrlock, pthread_rwlock_trywrlock
  nfp_old GLIBC_2.2.5, pthread_rwlockattr_init, pthread_rwlockattr_destroy, pthread_rwlockattr_setpshared
  nfp_old GLIBC_2.2.5, pthread_spin_init, pthread_spin_destroy
  nfp_old GLIBC_2.2.5, pthread_spin_lock, pthread_spin_trylock, pthread_spin_unlock
  nfp_old GLIBC_2.2.5, sem_init, sem_destroy, sem_post, sem_wait, sem_timedwait, sem_trywait
  nfp_old GLIBC_2.2.5, shm_open, shm_unlink
  nfp_old GLIBC_2.2.5, dladdr, dlclose, dlerror, dlopen, dlsym, dlvsym
  nfp_old GLIBC_2.3.4, dlmopen

  # Those of C23 read "0b1" too, in base 0 or 2 (glibc 2.38).
  nfp_forward __isoc23_strtol, strtol
  nfp_forward __isoc23_strtoul, strtoul
  nfp_forward __isoc23_strtoll, strtoll
  nfp_forward __isoc23_strtoull, strtoull
  nfp_forward __isoc23_strtoimax, strtoimax
  nfp_forward __isoc23_strtoumax, strtoumax
  nfp_forward __isoc23_wcstol, wcstol

  .popsection
)");

namespace {

constexpr int kStatVersion = 1;  // of struct stat on x86-64

struct EhFrameSearch {
  std::uintptr_t code;
  const void* header = nullptr;  // PT_GNU_EH_FRAME of the object that has `code`
};

int search_object(dl_phdr_info* object, std::size_t, void* data) {
  auto& search = *static_cast<EhFrameSearch*>(data);
  bool found = false;
  const void* header = nullptr;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = object->dlpi_phdr[i];
    const std::uintptr_t begin = object->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD && search.code - begin < part.p_memsz) found = true;
    if (part.p_type == PT_GNU_EH_FRAME) header = reinterpret_cast<const void*>(begin);
  }
  if (found) search.header = header;
  return found ? 1 : 0;
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): libc's names
extern "C" {

// glibc 2.30: std::condition_variable's waits until a steady time.
int pthread_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto own = reinterpret_cast<Wait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  return own != nullptr ? own(cond, mutex, clock, until) : nfp::cond_wait_by_realtime(cond, mutex, clock, until);
}

// glibc 2.32: true lets std::shared_ptr count without atomics.
char __libc_single_threaded = 0;

// glibc 2.33; before, <sys/stat.h> had them inline over these.
int __xstat(int, const char*, struct stat*) noexcept;
int __lxstat(int, const char*, struct stat*) noexcept;
int __fxstat(int, int, struct stat*) noexcept;
int __fxstatat(int, int, const char*, struct stat*, int) noexcept;
int stat(const char* path, struct stat* out) noexcept { return __xstat(kStatVersion, path, out); }
int lstat(const char* path, struct stat* out) noexcept { return __lxstat(kStatVersion, path, out); }
int fstat(int file, struct stat* out) noexcept { return __fxstat(kStatVersion, file, out); }
int fstat64(int file, struct stat64* out) noexcept {
  return __fxstat(kStatVersion, file, reinterpret_cast<struct stat*>(out));  // the same struct on x86-64
}
int fstatat(int folder, const char* path, struct stat* out, int flags) noexcept {
  return __fxstatat(kStatVersion, folder, path, out, flags);
}

// glibc 2.34.
int close_range(unsigned first, unsigned last, int flags) noexcept {
  return static_cast<int>(syscall(SYS_close_range, first, last, flags));
}

// glibc 2.35: the unwinder's way from code to its unwind tables, of which libgcc reads the header's address alone.
int _dl_find_object(void* code, dl_find_object* out) noexcept {
  EhFrameSearch search{reinterpret_cast<std::uintptr_t>(code)};
  dl_iterate_phdr(search_object, &search);
  if (search.header == nullptr) return -1;
  *out = {};
  out->dlfo_eh_frame = const_cast<void*>(search.header);
  return 0;
}

// glibc 2.36: std::random_device's source.
std::uint32_t arc4random() noexcept {
  std::uint32_t value = 0;
  if (getentropy(&value, sizeof(value)) != 0) std::abort();
  return value;
}

// glibc 2.38.
std::size_t strlcpy(char* out, const char* text, std::size_t size) noexcept {
  const std::size_t length = std::strlen(text);
  if (size > 0) {
    const std::size_t copied = std::min(length, size - 1);
    std::memcpy(out, text, copied);
    out[copied] = '\0';
  }
  return length;
}
std::size_t __strlcpy_chk(char* out, const char* text, std::size_t size, std::size_t room) noexcept {
  if (size > room) std::abort();
  return strlcpy(out, text, size);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)

namespace nfp {

int cond_wait_by_realtime(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  timespec now{};
  timespec deadline{};
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &deadline) != 0) return EINVAL;
  const std::int64_t nanoseconds = deadline.tv_nsec + (until->tv_nsec - now.tv_nsec);  // of (-1, 2) seconds
  const std::int64_t carry = nanoseconds < 0 ? -1 : nanoseconds / kSecond;
  deadline.tv_sec += until->tv_sec - now.tv_sec + carry;
  deadline.tv_nsec = nanoseconds - carry * kSecond;
  return pthread_cond_timedwait(cond, mutex, &deadline);
}

}  // namespace nfp
