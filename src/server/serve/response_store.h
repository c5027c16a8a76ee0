// Answers of the Responses API that clients may come back to (previous_response_id, GET /v1/responses/ID): in memory,
// within a budget of bytes, the ones longest unused go first. All functions are thread-safe.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace nfp::server {

class ResponseStore {
 public:
  struct Entry {
    std::string id;
    int key = 0;               // the API key that it belongs to; nobody else finds it
    std::string response;      // the answer as JSON
    std::string conversation;  // the messages that led to it, and its own, as a JSON array
  };

  explicit ResponseStore(uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Larger than the budget: not kept.
  void put(Entry entry);
  // Null where there is none (any more).
  std::shared_ptr<const Entry> find(std::string_view id, int key);
  bool erase(std::string_view id, int key);
  uint64_t bytes() const;

  // "resp_" and 128 bits that nobody can guess.
  static std::string make_id();
  // Of the response whose item this is ("msg_" and the same bits, and where it is among the items).
  static std::string id_of_item(std::string_view item_id);

 private:
  using List = std::list<std::shared_ptr<const Entry>>;  // most recently used first
  static uint64_t size_of(const Entry& entry);
  void remove(List::iterator place);  // locked

  const uint64_t max_bytes_;
  mutable std::mutex mutex_;
  uint64_t bytes_ = 0;
  List entries_;
  std::unordered_map<std::string_view, List::iterator> by_id_;  // views of the entries' own ids
};

}  // namespace nfp::server
