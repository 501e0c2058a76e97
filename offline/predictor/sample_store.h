#pragma once
// Room for the inputs that predictors are fitted on: ordinary memory, or a file that is mapped, so that what an
// interrupted run gathered is there for the next one. The system may write a file's pages out and drop them.
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "core/half.h"

namespace hearth::offline {

class SampleStore {
 public:
  // In memory, all zero.
  explicit SampleStore(uint64_t values);
  // In a file of that size (and a page), which stays when the store is gone. A file that is there already is taken up
  // when it was made for the same `identity` and number of values since the machine was started (pages that had not
  // reached the disk are lost with the machine); otherwise it is made anew. Throws Error when there is no room for it.
  SampleStore(const std::filesystem::path& file, const std::string& identity, uint64_t values);
  ~SampleStore();
  SampleStore(const SampleStore&) = delete;
  SampleStore& operator=(const SampleStore&) = delete;

  std::span<f16_t> values() { return {values_, n_}; }
  uint64_t bytes() const { return n_ * sizeof(f16_t); }
  // How far gathering has come, as its user counts: whatever was written before is there whenever this is.
  uint64_t progress() const;
  void set_progress(uint64_t progress);

 private:
  struct Header;
  void map(int fd);
  Header* header_ = nullptr;
  f16_t* values_ = nullptr;
  uint64_t n_ = 0;
};

}  // namespace hearth::offline
