#include "server/serve/response_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace nfp::server {

uint64_t ResponseStore::size_of(const Entry& entry) {
  constexpr uint64_t kNodes = 256;  // of the list and the map
  return sizeof(Entry) + kNodes + entry.id.capacity() + entry.response.capacity() + entry.conversation.capacity();
}

void ResponseStore::remove(List::iterator place) {
  bytes_ -= size_of(**place);
  by_id_.erase((*place)->id);
  entries_.erase(place);
}

void ResponseStore::put(Entry entry) {
  entry.conversation.shrink_to_fit();
  const auto made = std::make_shared<const Entry>(std::move(entry));
  const uint64_t size = size_of(*made);
  if (size > max_bytes_) return;
  const std::lock_guard lock(mutex_);
  if (const auto old = by_id_.find(made->id); old != by_id_.end()) remove(old->second);
  while (bytes_ + size > max_bytes_) remove(std::prev(entries_.end()));
  entries_.push_front(made);
  bytes_ += size;  // before what may throw: remove() takes it off again
  by_id_.emplace(made->id, entries_.begin());
}

std::shared_ptr<const ResponseStore::Entry> ResponseStore::find(std::string_view id, int key) {
  const std::lock_guard lock(mutex_);
  const auto place = by_id_.find(id);
  if (place == by_id_.end() || (*place->second)->key != key) return nullptr;
  entries_.splice(entries_.begin(), entries_, place->second);
  return entries_.front();
}

bool ResponseStore::erase(std::string_view id, int key) {
  const std::lock_guard lock(mutex_);
  const auto place = by_id_.find(id);
  if (place == by_id_.end() || (*place->second)->key != key) return false;
  remove(place->second);
  return true;
}

uint64_t ResponseStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::string ResponseStore::make_id() {
  std::random_device source;  // the kernel's
  return fmt::format("resp_{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

std::string ResponseStore::id_of_item(std::string_view item_id) {
  constexpr size_t kDigits = 32;
  item_id.remove_prefix(std::min(item_id.size(), item_id.find('_') + 1));
  return fmt::format("resp_{}", item_id.substr(0, kDigits));
}

}  // namespace nfp::server
