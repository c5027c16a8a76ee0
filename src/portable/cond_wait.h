#pragma once

#include <pthread.h>

#include <ctime>

namespace nfp {

// pthread_cond_clockwait() for a glibc that has none: the deadline becomes one of CLOCK_REALTIME, which `cond` must
// have been made for. When that clock is set meanwhile the wait is off by as much.
int cond_wait_by_realtime(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t clock, const timespec* until);

}  // namespace nfp
