#pragma once
// Beginnings of prompts whose pages are kept, so that the next prompt that begins alike need not be evaluated from the start.
// Whole pages alone, evaluated page by page: a text has the same bits with and without them.
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace hearth::serve {

class PrefixCache {
 public:
  // A sequence that holds the longest kept beginning of `ids`, without its last token, which must be evaluated anyway.
  // Nothing when no page is the same.
  std::optional<engine::Sequence> find(std::span<const int32_t> ids, const std::string& name);
  // Keeps the whole pages of a sequence in which are the first n_past() of `ids`.
  void keep(std::span<const int32_t> ids, const engine::Sequence& sequence);
  // Gives back the pages of the beginning that was used least recently; false: nothing is kept.
  bool drop_oldest();
  int64_t size() const { return static_cast<int64_t>(kept_.size()); }
  int64_t n_pages() const { return n_pages_; }  // that they hold, each counted once

 private:
  void count_pages();

  struct Kept {
    std::vector<int32_t> ids;
    engine::Sequence sequence;
  };
  std::list<Kept> kept_;  // the most recently used first
  int64_t n_pages_ = 0;
};

}  // namespace hearth::serve
