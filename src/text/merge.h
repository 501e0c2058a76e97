#pragma once
// Greedy pairwise merging, shared by BPE (by rank) and SPM (by score): the best adjacent pair of the whole word first,
// the leftmost among equals. A linked list and a queue make it O(n log n) in the word's length n.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace hearth::text {

struct Symbol {
  uint32_t begin;      // bytes of the word
  uint32_t length;     // 0: merged into its left neighbour
  int32_t prev, next;  // -1: none
  int32_t id;
};

// The merge of two neighbours; `priority`: smaller is merged first.
struct MergeTo {
  uint32_t priority;
  int32_t id;
};

// Buffers that are reused from word to word.
class Merger {
 public:
  void clear() { symbols_.clear(); }
  void add(uint32_t begin, uint32_t length, int32_t id) {
    const auto index = static_cast<int32_t>(symbols_.size());
    if (index > 0) symbols_.back().next = index;
    symbols_.push_back({begin, length, index - 1, -1, id});
  }

  // find(left, right, &merge): whether the two symbols can be merged, and into what.
  template <typename Find>
  void run(const Find& find) {
    queue_.clear();
    for (size_t i = 1; i < symbols_.size(); ++i) propose(static_cast<int32_t>(i - 1), find);
    std::make_heap(queue_.begin(), queue_.end(), std::greater<>());
    while (!queue_.empty()) {
      std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
      const Entry entry = queue_.back();
      queue_.pop_back();
      ++work_;
      apply(entry, find);
    }
  }

  // Calls emit(symbol) from left to right.
  template <typename Emit>
  void for_each(const Emit& emit) const {
    for (int32_t i = symbols_.empty() ? -1 : 0; i >= 0; i = symbols_[i].next) emit(symbols_[i]);
  }

  // Queue entries handled since construction: the measure of effort that tests bound.
  uint64_t work() const { return work_; }

 private:
  struct Entry {
    uint64_t key;     // priority, then position of the left symbol
    uint32_t length;  // of the merged symbol
    int32_t id;
    bool operator>(const Entry& other) const { return key > other.key; }
  };

  template <typename Find>
  bool propose(int32_t left, const Find& find) {
    const Symbol& l = symbols_[left];
    const Symbol& r = symbols_[l.next];
    MergeTo merge;
    if (!find(l, r, merge)) return false;
    const uint64_t key = uint64_t{merge.priority} << 32 | static_cast<uint32_t>(left);
    queue_.push_back({key, l.length + r.length, merge.id});
    return true;
  }

  template <typename Find>
  void apply(const Entry& entry, const Find& find) {
    const auto left = static_cast<int32_t>(entry.key & 0xFFFFFFFFu);
    Symbol& l = symbols_[left];
    // Outdated when either side has been merged since. Symbols only grow, so the total length tells: it stays the same
    // only if both are what they were.
    if (l.length == 0 || l.next < 0 || l.length + symbols_[l.next].length != entry.length) return;
    Symbol& r = symbols_[l.next];
    l.length = entry.length;
    l.id = entry.id;
    l.next = r.next;
    if (r.next >= 0) symbols_[r.next].prev = left;
    r.length = 0;
    if (l.prev >= 0 && propose(l.prev, find)) std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
    if (l.next >= 0 && propose(left, find)) std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
  }

  std::vector<Symbol> symbols_;
  std::vector<Entry> queue_;
  uint64_t work_ = 0;
};

}  // namespace hearth::text
