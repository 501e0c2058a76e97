#pragma once
// Devices that compute with rows of host memory: in place, over the link, or in slots that the rows visit for one batch.
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/experts.h"
#include "core/ops.h"

namespace hearth {

class ColdRows {
 public:
  // Page-locks host memory, so that copies from it run at the link's speed beside other work; undone by unpin().
  virtual void pin(void* host, size_t bytes) = 0;
  virtual void unpin(void* host) = 0;
  // Whether ffn_sparse() can read a shard of pinned host memory (SparseArgs::linked), and that shard: in place, or in
  // link_bytes() of pinned host memory at `memory`, where link() lays the rows out anew.
  virtual bool can_link(const FfnShard& host) const = 0;
  virtual size_t link_bytes(const FfnShard& host) const = 0;
  virtual FfnShard link(const FfnShard& host, std::byte* memory) = 0;
  // Slots of `bytes` each, for stage(). Called once.
  virtual void open_staging(int n_slots, size_t bytes) = 0;
  // Bytes of a slot that this shard takes.
  virtual size_t staged_bytes(const FfnShard& host) const = 0;
  // Begins to copy a shard of host memory into a slot, once the slot's last user is done; returns where it will be. To
  // be used by ffn_dense() with more than a few tokens, between acquire() and release().
  virtual FfnShard stage(int slot, const FfnShard& host) = 0;
  // The same of experts `ids` of a layer, in the file's layout or in panels, for ffn_experts(): the set has these alone.
  // It lives until the slot is staged anew.
  virtual size_t staged_bytes(const ExpertSet& host, std::span<const int32_t> ids) const = 0;
  virtual ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids) = 0;
  virtual void acquire(int slot) = 0;  // operations from here on see what stage() brought
  virtual void release(int slot) = 0;  // operations up to here are the slot's last users

 protected:
  ~ColdRows() = default;
};

// Memory that is page-locked for as long as this lives.
class PageLock {
 public:
  PageLock(ColdRows& device, void* host, size_t bytes) : device_(device), host_(host) { device.pin(host, bytes); }
  ~PageLock() { device_.unpin(host_); }
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

 private:
  ColdRows& device_;
  void* host_;
};

}  // namespace hearth
