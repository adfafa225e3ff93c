// Copies: a stream's items, which hold raw pointers and keep nothing alive.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/from_blob.h>

#include "runtime.h"

namespace sim {

// Where a tensor's elements lie. It keeps no memory alive: who frees too early is to see it in the numbers.
struct Place {
  char* data;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool conjugate, negative, dense, repeats;

  explicit Place(const at::Tensor& t)
      : data(static_cast<char*>(t.data_ptr())), sizes(t.sizes().vec()), strides(t.strides().vec()),
        dtype(t.scalar_type()), conjugate(t.is_conj()), negative(t.is_neg()),
        dense(t.is_non_overlapping_and_dense() && !conjugate && !negative),
        repeats(at::has_internal_overlap(t) == at::MemOverlap::Yes) {}
  at::Tensor tensor() const {
    at::Tensor made = at::from_blob(data, sizes, strides, at::TensorOptions(dtype));
    made._set_conj(conjugate);
    made._set_neg(negative);
    return made;
  }
};

// The bytes from a tensor's first element to its last.
size_t span(const at::Tensor& t) {
  return t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size()) : 0;
}

void move(const Place& to, const Place& from, size_t bytes) {
  bool alike = to.dtype == from.dtype && to.strides == from.strides;
  if (alike && ((to.dense && from.dense) || (to.repeats && from.repeats))) {  // repeats: what an operator expanded
    std::memcpy(to.data, from.data, bytes);
    return;
  }
  at::AutoDispatchBelowAutograd guard;
  to.tensor().copy_(from.tensor());
}

MarkPtr give_move(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from, at::Tensor keep = {}) {
  auto mark = std::make_shared<Mark>();
  Item item;
  item.mark = mark;
  item.work = [to = Place(to), from = Place(from), bytes = span(to), keep] { move(to, from, bytes); };
  give(stream.device_index(), stream.id(), std::move(item));
  return mark;
}

// One of the kinds of copies that are counted, and its bytes.
void count_copy(Count what, const at::Tensor& to) {
  count(what);
  count(static_cast<Count>(what + kToHostAsyncBytes - kToHostAsync), to.nbytes());
  World& w = world();
  Lock lock(w.lock);
  if (w.logs) w.log.insert(w.log.end(), {what, static_cast<int64_t>(to.nbytes())});
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool async = non_blocking && PinnedMemory::the().of(to.data_ptr());
  count_copy(async ? kToHostAsync : kToHostBlocking, to);
  auto mark = give_move(current(from.device().index()), to, from);
  async ? PinnedMemory::the().in_use(to.data_ptr(), mark) : wait_for(mark);
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  c10::Stream stream = current(to.device().index());
  if (!non_blocking) {
    count_copy(kToDeviceBlocking, to);
    wait_for(give_move(stream, to, from));
  } else if (PinnedMemory::the().of(from.data_ptr())) {
    count_copy(kToDeviceAsync, to);
    PinnedMemory::the().in_use(from.data_ptr(), give_move(stream, to, from));
  } else {
    count_copy(kToDeviceStaged, to);
    at::Tensor staged = from.clone();
    give_move(stream, to, staged, staged);
  }
}

// On the source's stream, which the destination's waits for and is waited for by, as in CUDA.
void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  c10::Stream source = current(from.device().index()), target = current(to.device().index());
  bool same = source.device() == target.device();
  count_copy(same ? kOnDevice : kBetweenDevices, to);
  if (!same) make_wait(source.device_index(), source.id(), mark_on(target.device_index(), target.id()));
  auto mark = give_move(source, to, from);
  if (!same) make_wait(target.device_index(), target.id(), mark);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || self.is_same(to)) return to;
  at::AutoDispatchBelowAutograd guard;
  at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (to.is_cpu())
    copy_to_host(from, to, non_blocking);
  else if (from.is_cpu())
    copy_to_device(from, to, non_blocking);
  else
    copy_on_devices(from, to);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

}  // namespace sim
