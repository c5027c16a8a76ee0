#include "server/tools/region_parser.h"

#include <algorithm>
#include <utility>

#include "server/tools/parser_parts.h"

namespace nfp::server {
namespace {

class RegionParser final : public ToolCallParser {
 public:
  explicit RegionParser(std::vector<CallRegion> regions) : regions_(std::move(regions)) {}

  void feed(std::string_view text, std::vector<ToolEvent>* events) override {
    ended_ = false;
    for (const char c : text) take(c, events);
    if (region_ == nullptr) release(partial(), events);
  }

  void finish(std::vector<ToolEvent>* events, bool cut) override {
    if (region_ != nullptr && (region_->close.empty() || region_->may_be_text || !cut)) {  // the model forgot to close
      end_region(held_, events);
    } else if (region_ == nullptr && !(called_ && held_.find_first_not_of(kBlanks) == std::string::npos)) {
      add_text(space_ + held_, events);
    }
    held_.clear();
    region_ = nullptr;
  }

  bool within_text() const override { return !ended_; }

 private:
  void take(char c, std::vector<ToolEvent>* events) {
    ended_ = ended_ && is_blank(c);
    held_ += c;
    if (region_ != nullptr && region_->list) {
      if (!end_.feed(c)) return;
      end_region(held_, events);
      held_.clear();
      region_ = nullptr;
      return;
    }
    if (region_ != nullptr) {
      if (region_->close.empty() || !held_.ends_with(region_->close)) return;
      end_region(std::string_view(held_).substr(0, held_.size() - region_->close.size()), events);
      held_.clear();
      region_ = nullptr;
      return;
    }
    for (const CallRegion& region : regions_) {
      if (c != region.open.back() || !held_.ends_with(region.open)) continue;
      const std::string_view before = std::string_view(held_).substr(0, held_.size() - region.open.size());
      if (region.from_start && (said_ || before.find_first_not_of(kBlanks) != std::string_view::npos)) continue;
      emit_all(before, events);
      held_ = region.keeps_open ? region.open : "";
      region_ = &region;
      end_ = {};
      end_.feed('[');
      return;
    }
  }

  // How much of the end of what is held may begin a mark.
  size_t partial() const {
    size_t longest = 0;
    for (const CallRegion& region : regions_) {
      if (!region.from_start || !said_) longest = std::max(longest, begun_mark(held_, region.open));
    }
    return longest;
  }

  void release(size_t keep, std::vector<ToolEvent>* events) {
    const size_t all = held_.size() - keep;
    emit_all(std::string_view(held_).substr(0, all), events);
    held_.erase(0, all);
  }

  // Text, and white space behind it that waits for what follows.
  void emit_all(std::string_view text, std::vector<ToolEvent>* events) {
    const size_t end = text.find_last_not_of(kBlanks) + 1;
    emit(text.substr(0, end), events);
    space_ += text.substr(end);
  }

  // White space around calls is part of the answer only where text follows.
  void emit(std::string_view text, std::vector<ToolEvent>* events) {
    if (text.empty()) return;
    said_ = true;
    called_ = false;
    add_text(std::exchange(space_, {}).append(text), events);
  }

  void end_region(std::string_view content, std::vector<ToolEvent>* events) {
    if (auto calls = region_->read(content)) {
      for (WrittenCall& call : *calls) {
        events->push_back({ToolEvent::Kind::kCall, std::move(call.name), ++call_});
        events->push_back({ToolEvent::Kind::kArguments, std::move(call.arguments), call_});
      }
      said_ = called_ = ended_ = true;
      return;
    }
    const bool closed = !region_->close.empty() && content.size() < held_.size();
    emit((region_->keeps_open ? "" : region_->open) + std::string(content) + (closed ? region_->close : ""), events);
  }

  const std::vector<CallRegion> regions_;
  const CallRegion* region_ = nullptr;
  std::string held_;
  std::string space_;    // since the last text
  bool said_ = false;    // text or a call
  bool called_ = false;  // since the last text
  bool ended_ = false;   // a call, with what was fed last
  JsonValueEnd end_;     // of a region that is a list
  int call_ = -1;
};

}  // namespace

std::unique_ptr<ToolCallParser> make_region_parser(std::vector<CallRegion> regions) {
  return std::make_unique<RegionParser>(std::move(regions));
}

}  // namespace nfp::server
