// Streams and events of the simulated accelerator: a stream is a queue with a thread that does its items in order, each
// after a random delay, while the host runs ahead.
//
// All of it is one world under one lock, never destroyed: at exit, threads and tensors may outlive any static object.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <pthread.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreams = 33;  // the default stream and a pool of 32, given out in turn, as CUDA does
using Clock = std::chrono::steady_clock;

// What tests count. "Waits" are the host's own; the fallback to the CPU drains streams too, which is no host's wait.
enum Count {
  kStreamWaits, kEventWaits, kDeviceWaits,
  kOperatorWaits,  // for a result that is a number, or has its shape from the data
  kToHostAsync, kToHostBlocking, kToDeviceAsync, kToDeviceStaged, kToDeviceBlocking, kOnDevice, kBetweenDevices,
  kToHostAsyncBytes, kToHostBlockingBytes, kToDeviceAsyncBytes, kToDeviceStagedBytes, kToDeviceBlockingBytes,
  kOnDeviceBytes, kBetweenDevicesBytes, kOperators,
  kOperatorsAhead,  // given to a stream without its host having drained it
  kCounts
};

struct Queue;

// A point in a stream's work; done once the stream has come to it.
struct Mark {
  bool done = false;
  bool waited = false;  // the host has waited for it
  int64_t number = 0;   // of the event that it was recorded for
  Queue* queue = nullptr;
  uint64_t place = 0;  // which item of the queue it is, from 1
  Clock::time_point when;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Item {
  std::function<void()> work;   // run without the lock
  std::function<bool()> until;  // asked under the lock; the stream stands still before it is true
  MarkPtr mark;
  bool delayed = true;
};

struct Queue {
  std::deque<Item> items;
  std::condition_variable ready;
  uint64_t given = 0, done = 0;
  uint64_t known = 0;  // so many items the host knows to be done, because it waited for them
  std::mt19937_64 random;
  bool started = false;
};

struct World {
  std::mutex lock;
  std::condition_variable changed;  // an item is done, a gate is open, or the process ends
  Queue queues[kDevices][kStreams];
  std::set<int64_t> shut;  // gates that hold a stream
  int64_t gates = 0;
  int next[kDevices] = {0, 0};
  double most_seconds = 100e-6;
  int64_t recorded = 0;  // events
  int64_t arrived = 0;   // the last event that was recorded before the host waited for all of a device or a stream
  int64_t ahead = 0;     // of so many events, the last ones, a query says that they are not done yet
  std::atomic<uint64_t> lag{0};  // of so many items, the last ones of a stream, a query says that they are not done yet
  bool logs = false;
  std::vector<int64_t> log;  // while it logs: the kind and the bytes of each copy, in the order of calls
  int working = 0;
  bool stopping = false;
  std::atomic<bool> forked{false};  // in a child: there are no threads, and locks may be held for ever
  std::atomic<bool> poison{true};
  std::atomic<int64_t> counts[kCounts] = {};
};

inline World& world() {
  static World* made = new World;
  return *made;
}

inline void count(Count what, int64_t by = 1) { world().counts[what] += by; }

using Lock = std::unique_lock<std::mutex>;

inline void delay(Queue& queue, Lock& lock) {
  double most = world().most_seconds;
  if (most <= 0) return;
  std::chrono::duration<double> time(std::uniform_real_distribution<double>(0, most)(queue.random));
  lock.unlock();
  std::this_thread::sleep_for(time);
  lock.lock();
}

// One stream's thread. When the process stops it stays where it is: nothing it could reach is sure to live.
inline void serve(Queue& queue) {
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1UL);  // a delay ends on time, and not up to 50 microseconds later
#endif
  World& w = world();
  Lock lock(w.lock);
  while (true) {
    queue.ready.wait(lock, [&] { return !queue.items.empty() && !w.stopping; });
    Item item = std::move(queue.items.front());
    queue.items.pop_front();
    if (item.delayed) delay(queue, lock);
    if (item.until) w.changed.wait(lock, item.until);
    if (w.stopping) queue.ready.wait(lock, [] { return false; });
    if (item.work) {
      ++w.working;
      lock.unlock();
      item.work();
      item.work = nullptr;  // frees what it holds
      lock.lock();
      --w.working;
    }
    if (item.mark) {
      item.mark->done = true;
      item.mark->when = Clock::now();
    }
    ++queue.done;
    w.changed.notify_all();
  }
}

// Gives an item to a stream and returns at once.
inline void give(int device, int64_t stream, Item item) {
  World& w = world();
  if (w.forked) return;
  Lock lock(w.lock);
  Queue& queue = w.queues[device][stream];
  if (!queue.started) {
    queue.started = true;
    std::thread(serve, std::ref(queue)).detach();
  }
  ++queue.given;
  if (item.mark) {
    item.mark->queue = &queue;
    item.mark->place = queue.given;
  }
  queue.items.push_back(std::move(item));
  queue.ready.notify_all();
}

inline MarkPtr mark_on(int device, int64_t stream) {
  auto mark = std::make_shared<Mark>();
  Item item;
  item.mark = mark;
  give(device, stream, std::move(item));
  return mark;
}

inline void make_wait(int device, int64_t stream, MarkPtr mark) {
  Item item;
  item.until = [mark] { return mark->done; };
  item.delayed = false;
  give(device, stream, std::move(item));
}

inline bool is_done(const MarkPtr& mark) {
  if (!mark || world().forked) return true;
  Lock lock(world().lock);
  return mark->done;
}

// What a query says: the host may be ahead by more than the streams are behind.
inline bool is_seen_done(const MarkPtr& mark) {
  World& w = world();
  if (!mark || w.forked) return true;
  Lock lock(w.lock);
  const Queue& queue = *mark->queue;
  bool lags = mark->place > queue.known && mark->place + w.lag > queue.given;
  return mark->done && (mark->waited || (!lags && mark->number <= std::max(w.arrived, w.recorded - w.ahead)));
}

inline void number(const MarkPtr& mark) {
  Lock lock(world().lock);
  mark->number = ++world().recorded;
}

inline void arrive() {
  Lock lock(world().lock);
  world().arrived = world().recorded;
}

inline void host_waits(const std::function<bool()>& done) {
  World& w = world();
  if (w.forked) return;
  Lock lock(w.lock);
  w.changed.wait(lock, [&] { return w.stopping || done(); });
}

inline void wait_for(const MarkPtr& mark) {
  if (mark) host_waits([&] {
    if (mark->done) mark->queue->known = std::max(mark->queue->known, mark->place);
    return mark->waited = mark->done;
  });
}

inline void drain(int device, int64_t stream) {
  World& w = world();
  if (w.forked) return;
  Queue& queue = w.queues[device][stream];
  uint64_t given;
  {
    Lock lock(w.lock);
    given = queue.given;
  }
  host_waits([&] {
    if (queue.done >= given) queue.known = std::max(queue.known, given);
    return queue.done >= given;
  });
}

inline bool is_drained(int device, int64_t stream) {
  if (world().forked) return true;
  Lock lock(world().lock);
  Queue& queue = world().queues[device][stream];
  return queue.done == queue.given && (!world().lag || queue.known == queue.given);
}

inline void drain_device(int device) {
  for (int stream = 0; stream < kStreams; ++stream) drain(device, stream);
}

inline int64_t new_stream(int device) {
  if (world().forked) return 0;
  Lock lock(world().lock);
  return 1 + world().next[device]++ % (kStreams - 1);
}

// Shuts a gate and puts it into the stream: nothing after it is done before `open_gate`.
inline int64_t hold(int device, int64_t stream) {
  World& w = world();
  int64_t gate;
  {
    Lock lock(w.lock);
    gate = w.gates++;
    w.shut.insert(gate);
  }
  Item item;
  item.until = [gate, &w] { return w.shut.count(gate) == 0; };
  item.delayed = false;
  give(device, stream, std::move(item));
  return gate;
}

inline void open_gate(int64_t gate) {
  Lock lock(world().lock);
  world().shut.erase(gate);
  world().changed.notify_all();
}

inline void set_delays(double most_seconds, uint64_t seed) {
  World& w = world();
  Lock lock(w.lock);
  w.most_seconds = most_seconds;
  for (int d = 0; d < kDevices; ++d)
    for (int s = 0; s < kStreams; ++s) w.queues[d][s].random.seed(seed * 1000 + d * kStreams + s);
}

// Ends with the process: no item begins any more, and the one being done is waited for.
struct AtExit {
  AtExit() {
    world();
    pthread_atfork(nullptr, nullptr, [] { world().forked = true; });
  }
  ~AtExit() {
    World& w = world();
    if (w.forked) return;
    Lock lock(w.lock);
    w.stopping = true;
    w.changed.notify_all();
    w.changed.wait(lock, [&] { return w.working == 0; });
  }
};

}  // namespace sim
