// The decode steps that have been captured: one graph a shape, within a budget of device memory.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "backend/backend.h"
#include "engine/batch.h"

namespace nfp {

class CapturedSteps {
 public:
  explicit CapturedSteps(size_t most_bytes) : most_bytes_(most_bytes) {}

  // Whether a shape occurs for the first time: what is loaded late is loaded by running it, not by capturing it.
  bool first(const StepShape& shape) { return shapes_.try_emplace(shape, graphs_.end()).second; }
  // Null where there is none. Counts as a use.
  Graph* find(const StepShape& shape) {
    const auto place = shapes_.find(shape);
    if (place == shapes_.end() || place->second == graphs_.end()) return nullptr;
    graphs_.splice(graphs_.begin(), graphs_, place->second);
    return place->second->graph.get();
  }
  // Where all of them take more than the budget, those that were used longest ago go; this one stays.
  Graph& keep(const StepShape& shape, std::unique_ptr<Graph> graph) {
    bytes_ += graph->bytes();
    graphs_.push_front({shape, std::move(graph)});
    shapes_[shape] = graphs_.begin();
    while (bytes_ > most_bytes_ && graphs_.size() > 1) {
      bytes_ -= graphs_.back().graph->bytes();
      shapes_[graphs_.back().shape] = graphs_.end();
      graphs_.pop_back();
    }
    return *graphs_.front().graph;
  }
  size_t count() const { return graphs_.size(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Captured {
    StepShape shape;
    std::unique_ptr<Graph> graph;
  };
  const size_t most_bytes_;
  size_t bytes_ = 0;
  std::list<Captured> graphs_;                                                          // the last used first
  std::unordered_map<StepShape, std::list<Captured>::iterator, StepShapeHash> shapes_;  // end(): seen, none kept
};

}  // namespace nfp
