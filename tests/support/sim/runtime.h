// What torch asks a device's runtime for: the current device and stream, streams, events, generators, pinned memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

thread_local int device_now = 0;
thread_local int64_t streams_now[kDevices] = {0, 0};

int current_device() { return device_now; }

c10::Device device_of(int index) { return {kType, static_cast<c10::DeviceIndex>(index < 0 ? device_now : index)}; }

c10::Stream current(int device) {
  c10::Device where = device_of(device);
  return c10::Stream(c10::Stream::UNSAFE, where, streams_now[where.index()]);
}

// ---- streams and events, as torch asks for them

struct Event {
  MarkPtr mark;
  bool timed = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_of(device_now); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "sim has ", kDevices, " devices, and no device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    c10::Device where = device_of(device.index());
    return c10::Stream(c10::Stream::UNSAFE, where, new_stream(where.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = current(stream.device_index());
    streams_now[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return is_drained(s.device_index(), s.id()); }
  void synchronizeStream(const c10::Stream& s) const override {
    count(kStreamWaits);
    drain(s.device_index(), s.id());
    arrive();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count(kDeviceWaits);
    drain_device(device);
    arrive();
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    recorded->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    recorded->mark = mark_on(s.device_index(), s.id());
    number(recorded->mark);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) make_wait(s.device_index(), s.id(), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override { return !event || is_seen_done(static_cast<Event*>(event)->mark); }
  void synchronizeEvent(void* event) const override {
    count(kEventWaits);
    if (event) wait_for(static_cast<Event*>(event)->mark);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from && to && from->timed && to->timed, "both events must be recorded with enable_timing=True");
    TORCH_CHECK(is_done(from->mark) && is_done(to->mark), "both events must be completed before their time is taken");
    return std::chrono::duration<double, std::milli>(to->mark->when - from->mark->when).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    DeviceMemory::the().recordStream(data, s);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- random numbers: each device has its own generator, of the CPU's kind, so that equal seeds give equal numbers

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = device_of(device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(int device) {
  static auto* made = new std::vector<at::Generator>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*made)[device_of(device).index()];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::the().of(data) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::the(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &PinnedMemory::the())

const bool registered = [] {
  c10::SetAllocator(kType, &DeviceMemory::the());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace sim
