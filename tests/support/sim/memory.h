// Memory of the simulated accelerator: a caching allocator for each device and stream, and one for pinned host memory.
//
// Nothing is ever given back to the system, so that use after free gives wrong numbers and no crash; a block that is
// freed is filled with NaN bytes by its stream, and is the first to be given out again on that stream, at once.
#pragma once

#include <cstring>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace sim {

constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 in every integer one
constexpr auto kType = c10::DeviceType::PrivateUse1;

using StreamKey = std::pair<int, int64_t>;

struct Block {
  char* data;
  size_t size;      // what it can hold
  size_t used = 0;  // what it was asked for, as a multiple of 512
  StreamKey home;
  std::set<StreamKey> others;    // streams that use it too: record_stream
  std::vector<MarkPtr> pending;  // to be done before it may be given out again

  bool is_idle() {
    for (auto& mark : pending)
      if (!is_done(mark)) return false;
    pending.clear();
    return true;
  }
};

inline size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

inline Block* fresh(size_t size, StreamKey home) {
  auto* block = new Block{static_cast<char*>(std::aligned_alloc(512, size)), size, 0, home, {}, {}};
  std::memset(block->data, kPoison, size);
  return block;
}

// Free blocks, the last freed last. A block serves what it would hold at least half full.
using Pool = std::vector<Block*>;

inline Block* take(Pool& pool, size_t size) {
  for (auto it = pool.rbegin(); it != pool.rend(); ++it) {
    if ((*it)->size < size || (*it)->size > 2 * size || !(*it)->is_idle()) continue;
    Block* block = *it;
    pool.erase(std::next(it).base());
    return block;
  }
  return nullptr;
}

c10::Stream current(int device);
int current_device();

struct DeviceMemory final : c10::DeviceAllocator {
  std::mutex lock;
  std::map<StreamKey, Pool> pools;
  Pool waiting;  // freed, but in use by a stream that was recorded
  c10::CachingAllocator::Stat allocated[kDevices], reserved[kDevices];
  int64_t capacity = int64_t{1} << 50;  // bytes that tensors may take on each device

  static DeviceMemory& the() {
    static auto* made = new DeviceMemory;
    return *made;
  }

  static void give_back(void* block) { the().free(static_cast<Block*>(block)); }

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!world().forked, "sim cannot be used in a forked process");
    int device = current_device();
    c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, where};
    StreamKey home{device, current(device).id()};
    Lock hold(lock);
    release_waiting();
    TORCH_CHECK_WITH(OutOfMemoryError, allocated[device].current + static_cast<int64_t>(bytes) <= capacity,
                     "sim out of memory: ", bytes, " bytes asked for, ", allocated[device].current, " allocated");
    Block* block = take(pools[home], rounded(bytes));
    if (!block) {
      block = fresh(rounded(bytes), home);
      reserved[device].increase(block->size);
    }
    block->used = rounded(bytes);
    allocated[device].increase(block->used);
    return {block->data, block, &give_back, where};
  }

  void free(Block* block) {
    if (world().forked) return;
    Lock hold(lock);
    allocated[block->home.first].decrease(block->used);
    for (auto& [device, stream] : block->others) block->pending.push_back(mark_on(device, stream));
    block->others.clear();
    if (!block->pending.empty()) return waiting.push_back(block);
    to_pool(block);
  }

  void to_pool(Block* block) {
    if (world().poison) {
      Item item;
      item.work = [block] { std::memset(block->data, kPoison, block->size); };
      item.delayed = false;
      give(block->home.first, block->home.second, std::move(item));
    }
    pools[block->home].push_back(block);
  }

  void release_waiting() {
    Pool still;
    for (Block* block : waiting) block->is_idle() ? to_pool(block) : still.push_back(block);
    waiting.swap(still);
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (!ptr.get_context() || ptr.get_deleter() != &give_back) return;
    Lock hold(lock);
    auto* block = static_cast<Block*>(ptr.get_context());
    StreamKey key{stream.device_index(), stream.id()};
    if (key != block->home) block->others.insert(key);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock hold(lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = allocated[device];
    stats.active_bytes[0] = allocated[device];
    stats.reserved_bytes[0] = reserved[device];
    return stats;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock hold(lock);
    return {std::max<int64_t>(0, capacity - reserved[device].current), capacity};
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Lock hold(lock);
    allocated[device].reset_peak();
    reserved[device].reset_peak();
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock hold(lock);
    allocated[device].reset_accumulated();
    reserved[device].reset_accumulated();
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock hold(lock);
    for (auto& [home, pool] : pools) {
      for (Block* block : pool) reserved[home.first].decrease(block->size);
      pool.clear();
    }
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
};

// Pinned host memory. As in torch's own for CUDA, a block with an asynchronous copy on its way is not given out again
// before that copy is done.
struct PinnedMemory final : at::HostAllocator {
  std::mutex lock;
  std::map<char*, Block*> all;
  Pool pool;
  c10::CachingAllocator::Stat allocated;

  static PinnedMemory& the() {
    static auto* made = new PinnedMemory;
    return *made;
  }

  static void give_back(void* block) { the().free(static_cast<Block*>(block)); }

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!world().forked, "sim cannot be used in a forked process");
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::DeviceType::CPU};
    Lock hold(lock);
    Block* block = take(pool, rounded(bytes));
    if (!block) {
      block = fresh(rounded(bytes), {});
      all[block->data] = block;
    }
    if (world().poison) std::memset(block->data, kPoison, block->size);
    block->used = rounded(bytes);
    allocated.increase(block->used);
    return {block->data, block, &give_back, c10::DeviceType::CPU};
  }

  void free(Block* block) {
    if (world().forked) return;
    Lock hold(lock);
    allocated.decrease(block->used);
    pool.push_back(block);
  }

  // The block that `data` lies in, or none.
  Block* of(const void* data) {
    if (world().forked) return nullptr;
    Lock hold(lock);
    auto it = all.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (it == all.begin()) return nullptr;
    Block* block = std::prev(it)->second;
    return data < block->data + block->size ? block : nullptr;
  }

  void in_use(const void* data, MarkPtr mark) {
    Block* block = of(data);
    Lock hold(lock);
    if (block) block->pending.push_back(std::move(mark));
  }

  bool record_event(void* data, void*, c10::Stream stream) override {
    if (!of(data)) return false;
    in_use(data, mark_on(stream.device_index(), stream.id()));
    return true;
  }

  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace sim
