#include "server/grammar/grammar_wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace nfp::server {

std::optional<std::pair<Fd, Fd>> socket_pair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return std::nullopt;
  return std::pair(Fd(fds[0]), Fd(fds[1]));
}

bool send_all(int fd, const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

bool receive_all(int fd, void* data, size_t size) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t n = recv(fd, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

bool connected(int fd) {
  pollfd peer{fd, 0, 0};
  return poll(&peer, 1, 0) == 0 || (peer.revents & (POLLHUP | POLLERR | POLLNVAL)) == 0;
}

bool send_with_fd(int channel, char what, int fd, bool wait) {
  iovec data{&what, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &fd, sizeof(int));
  }
  ssize_t n = 0;
  do {
    n = sendmsg(channel, &message, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
  } while (n < 0 && errno == EINTR);
  return n == 1;
}

std::optional<std::pair<char, Fd>> receive_with_fd(int channel) {
  char what = 0;
  iovec data{&what, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t n = 0;
  do {
    n = recvmsg(channel, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n != 1) return std::nullopt;
  Fd fd;
  if (const cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr && head->cmsg_type == SCM_RIGHTS) {
    int got = -1;
    std::memcpy(&got, CMSG_DATA(head), sizeof(int));
    fd = Fd(got);
  }
  return std::pair(what, std::move(fd));
}

}  // namespace nfp::server
