// A simulated accelerator, "sim": device memory is host memory, and all that a stream is given comes to pass later.
//
// Operators are computed by the CPU on what device memory holds once the current stream is drained, so the numbers are
// the CPU's bit for bit. Their results are written by the current stream, later: whoever reads them on another stream
// without waiting for an event reads something else.
#define AT_PER_OPERATOR_HEADERS  // not all of torch: half the time to compile
#include <ATen/TensorOperators.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "copies.h"

namespace at::autocast {  // of ATen/autocast_mode.h, which brings all of torch
TORCH_API Tensor cached_cast(ScalarType to, const Tensor& t, DeviceType device);
TORCH_API ScalarType get_autocast_dtype(DeviceType device);
}  // namespace at::autocast

namespace sim {

// ---- memory and views

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
using Sizes = c10::IntArrayRef;

at::Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool> pinned,
                 std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the CPU can be pinned");
  c10::DeviceGuard guard(device.value_or(device_of(-1)));
  return at::detail::empty_generic(size, &DeviceMemory::the(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(device_of(-1)));
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::the(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = DeviceMemory::the().allocate(bytes);
  Item item;
  item.work = [to = fresh.get(), from = impl->data(), size = std::min(bytes, impl->nbytes())] {
    if (size) std::memcpy(to, from, size);
  };
  c10::Stream stream = current(storage.device().index());
  give(stream.device_index(), stream.id(), std::move(item));
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, Sizes size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t bytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.numel() && bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t{}, 0, &DeviceMemory::the(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceMemory::the().recordStream(self.storage().data_ptr(), stream);
}

// ---- operators: the CPU computes them

// The passage of one operator's tensors to the CPU and back.
struct Crossing {
  int device = -1;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;  // device memory as the CPU sees it
  std::vector<std::pair<at::Tensor, at::Tensor>> read, written;  // on the device, for the CPU
  std::vector<std::pair<Place, at::Tensor>> results;             // to be written by the stream
  std::vector<size_t> spans;

  void find_device(const at::Tensor& t) {
    if (!t.defined() || !t.is_privateuseone()) return;
    TORCH_CHECK(device < 0 || device == t.device().index(), "the tensors are on sim:", device, " and ", t.device());
    device = t.device().index();
  }

  // What is only read is the device's memory itself.
  at::Tensor aliased(const at::Tensor& t) {
    auto* impl = t.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end()) {
      c10::DataPtr data(impl->_mutable_data_ptr_no_checks().get(), c10::DeviceType::CPU);
      c10::Storage seen(c10::Storage::use_byte_size_t{}, impl->nbytes(), std::move(data), nullptr, false);
      found = storages.emplace(impl, std::move(seen)).first;
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  // What is written is copied, or others would see it before the stream has come to it.
  at::Tensor copied(const at::Tensor& t) {
    at::Tensor made = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
    if (t.numel()) std::memcpy(made.data_ptr(), t.data_ptr(), span(t));
    return made;
  }

  at::Tensor to_cpu(const at::Tensor& t, bool is_written) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    TORCH_CHECK(t.layout() == c10::kStrided, "sim has strided tensors only");
    auto& list = is_written ? written : read;
    for (auto& [there, here] : list)
      if (there.is_same(t)) return here;
    list.emplace_back(t, is_written ? copied(t) : aliased(t));
    return list.back().second;
  }

  void give_back(const at::Tensor& to, const at::Tensor& from) {
    if (!from.numel()) return;
    // Zeros that torch never wrote down (a tangent that is not there) have no memory to copy from.
    results.emplace_back(Place(to), from._is_zerotensor() ? at::zeros_like(from) : from);
    spans.push_back(span(to));
  }

  at::Tensor to_device(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (auto* list : {&written, &read})
      for (auto& [there, here] : *list)
        if (here.is_same(t)) return there;
    for (auto& [there, here] : read)  // a view of what was given
      if (t.storage().unsafeGetStorageImpl() == here.storage().unsafeGetStorageImpl())
        return viewed(there, t);
    at::Tensor made = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, device_of(device), {});
    give_back(made, t);
    return made;
  }

  static at::Tensor viewed(const at::Tensor& there, const at::Tensor& t) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(there.storage()), there.key_set(), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return made;
  }

  void write_arguments() {
    for (auto& [there, here] : written) {
      if (there.sizes() != here.sizes()) {  // an `out` that was made to fit
        sim::resize(there, here.sizes(), std::nullopt);
        there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), there.storage_offset());
      }
      give_back(there, here);
    }
  }

  void give_results(const c10::Stream& stream) {
    if (results.empty()) return;
    Item item;
    item.work = [results = std::move(results), spans = std::move(spans)] {
      for (size_t i = 0; i < results.size(); ++i) move(results[i].first, Place(results[i].second), spans[i]);
    };
    give(stream.device_index(), stream.id(), std::move(item));
  }
};

// Applies `change` to each tensor of an argument or a result.
template <class Change>
void each_tensor(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(change(t));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      made.push_back(t ? std::optional<at::Tensor>(change(*t)) : std::nullopt);
    value = made;
  }
}

// Operators for which CUDA's host waits as well: the shape of the result is in the data.
bool makes_host_wait(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  static const std::set<std::string> kShapes{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
  if (kShapes.count(schema.name())) return true;
  for (const auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    if (kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType) return true;
  }
  if (schema.name().rfind("aten::index", 0) != 0 && schema.name() != "aten::_index_put_impl_") return false;
  for (const auto& value : arguments)
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        if (t && t->defined() && t->scalar_type() == c10::kBool) return true;
  return false;
}

// The CPU has no use for a device's generator: it works with one of its own in the same state.
struct Twin {
  at::Generator ours, twin;

  void enter(const c10::Argument& argument, c10::IValue& value, int device) {
    if (argument.name() != "generator") return;
    ours = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(ours.device().type() == kType, "a generator of ", ours.device(), " was given for tensors of sim");
    twin = at::make_generator<at::CPUGeneratorImpl>();
    twin.set_state(ours.get_state());
    value = twin;
  }
  void leave() {
    if (ours.defined()) ours.set_state(twin.get_state());
  }
};

// ---- operators that a stream computes later

// The operators that had a kernel of the meta device's when this library was loaded: most of them take their shapes from
// one function for all devices. Python registers others later, whose shapes may be those of a GPU.
std::set<std::pair<std::string, std::string>>& structured() {
  static auto* made = new std::set<std::pair<std::string, std::string>>;
  return *made;
}

// An argument of an operator that a stream is given: a place on the device, or a value. It keeps no device memory alive.
struct Later {
  c10::IValue value;                              // without the tensors of the device
  std::vector<std::optional<Place>> places;       // one for each tensor of the value; none for one of the CPU's
  std::vector<std::optional<at::Tensor>> tensors;  // copies of those of the CPU's
  std::vector<bool> numbers;                      // wrapped ones

  void add(const at::Tensor& t) {
    bool is_ours = t.defined() && t.is_privateuseone();
    places.push_back(is_ours ? std::optional<Place>(Place(t)) : std::nullopt);
    tensors.push_back(is_ours ? std::nullopt : std::optional<at::Tensor>(t.defined() ? t.clone() : t));
    numbers.push_back(t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number());
  }
  at::Tensor tensor(size_t i) const {
    at::Tensor made = places[i] ? places[i]->tensor() : *tensors[i];
    if (numbers[i]) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }
};

[[noreturn]] void give_up(const c10::OperatorHandle& op, const std::string& why) {
  std::fprintf(stderr, "sim: %s, which a stream computed behind its host: %s\n", op.schema().name().c_str(), why.c_str());
  std::abort();
}

// What an operator gives, without computing it: run on the meta device. None where that cannot be known so.
struct Foreseen {
  std::vector<std::pair<at::Tensor, at::Tensor>> arguments;  // on the device, and its likeness
  torch::jit::Stack results;

  at::Tensor alike(const at::Tensor& t) {
    if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return t;  // a number stays one
    for (auto& [there, here] : arguments)
      if (there.is_same(t)) return here;
    at::Tensor made = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type(), c10::kStrided,
                                                     c10::Device(c10::kMeta), false);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    arguments.emplace_back(t, made);
    return made;
  }

  // The argument that a result is; an undefined tensor if it is a new one.
  std::optional<at::Tensor> argument(const at::Tensor& result) {
    for (auto& [there, here] : arguments)
      if (here.is_same(result)) return there;
    return std::nullopt;
  }

  bool run(const c10::OperatorHandle& op, const torch::jit::Stack& given) {
    results = given;
    for (auto& value : results) {
      each_tensor(value, [&](const at::Tensor& t) { return alike(t); });
      if (value.isDevice()) value = c10::Device(c10::kMeta);
    }
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
    } catch (const std::exception&) {
      return false;  // the CPU says what is wrong, if anything is
    }
    bool known = true;
    for (auto& value : results)
      each_tensor(value, [&](const at::Tensor& t) {
        if (!t.defined() || argument(t)) return t;
        known = known && t.is_meta() && t.layout() == c10::kStrided;
        for (auto& [there, here] : arguments)
          known = known && !(here.defined() && here.storage().is_alias_of(t.storage()));
        return t;
      });
    return known;
  }
};

bool gives_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// Whether shapes do not depend on data, numbers do not depend on the order of operators in other streams, and the meta
// device gives the shapes that the CPU gives: a structured kernel has them from one function, others are named here.
bool can_come_later(const c10::OperatorHandle& op, const torch::jit::Stack& given) {
  static const std::set<std::string> kAlike{
      "aten::convolution", "aten::convolution_backward", "aten::native_layer_norm", "aten::native_layer_norm_backward",
      "aten::native_batch_norm", "aten::native_batch_norm_backward",
      "aten::embedding", "aten::embedding_dense_backward", "aten::fill_", "aten::zero_", "aten::relu", "aten::relu_",
      "aten::mul", "aten::masked_fill_", "aten::masked_fill", "aten::copy_", "aten::clone", "aten::_to_copy"};
  const auto& schema = op.schema();
  if (makes_host_wait(schema, given) || op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  for (const auto& argument : schema.arguments())
    if (argument.name() == "generator" || (argument.kwarg_only() && argument.alias_info()))
      return false;  // an `out` may be resized
  if (gives_view(schema)) return false;  // it reads no memory
  for (size_t i = 0; i < given.size(); ++i)  // of a batch norm in evaluation the CPU gives other statistics
    if (schema.arguments()[i].name().rfind("train", 0) == 0 && given[i].isBool() && !given[i].toBool()) return false;
  for (const auto& value : given) {
    bool plain = true;
    if (value.isTensor() && value.toTensor().defined())
      plain = value.toTensor().layout() == c10::kStrided && !value.toTensor()._is_zerotensor();
    if (!plain) return false;
  }
  return kAlike.count(schema.name()) || structured().count({schema.name(), schema.overload_name()});
}

// Gives the operator to the stream; false if its host has to wait for what the stream was given before.
bool comes_later(const c10::OperatorHandle& op, const torch::jit::Stack& given, const c10::Stream& stream,
                 torch::jit::Stack* stack) {
  Foreseen foreseen;
  if (!can_come_later(op, given) || !foreseen.run(op, given)) return false;
  std::vector<Later> arguments;
  for (const auto& value : given) {
    Later later;
    c10::IValue copy = value;
    each_tensor(copy, [&](const at::Tensor& t) { return later.add(t), at::Tensor(); });
    later.value = copy.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : copy;
    arguments.push_back(std::move(later));
  }
  std::vector<std::optional<Place>> places;  // of each tensor of the results; none for an argument and for no tensor
  std::vector<size_t> spans;
  for (auto& value : foreseen.results) {
    each_tensor(value, [&](const at::Tensor& t) {
      auto argument = t.defined() ? foreseen.argument(t) : std::optional<at::Tensor>(t);
      at::Tensor made = argument ? *argument : empty_strided(t.sizes(), t.strides(), t.scalar_type(), {},
                                                             device_of(stream.device_index()), {});
      bool is_new = !argument && made.numel() > 0;
      places.push_back(is_new ? std::optional<Place>(Place(made)) : std::nullopt);
      spans.push_back(is_new ? span(made) : 0);
      return made;
    });
    stack->push_back(value);
  }
  Item item;
  item.work = [op, arguments = std::move(arguments), places = std::move(places), spans = std::move(spans)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    torch::jit::Stack work;
    for (const Later& later : arguments) {
      c10::IValue value = later.value;
      size_t i = 0;
      each_tensor(value, [&](const at::Tensor&) { return later.tensor(i++); });
      work.push_back(std::move(value));
    }
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &work);
    } catch (const std::exception& error) {
      give_up(op, error.what());
    }
    size_t i = 0;
    for (auto& value : work)
      each_tensor(value, [&](const at::Tensor& t) {
        if (places[i]) {
          if (!t.defined() || t.sizes() != c10::IntArrayRef(places[i]->sizes)) give_up(op, "another shape than foreseen");
          move(*places[i], Place(t._is_zerotensor() ? at::zeros_like(t) : t), spans[i]);
        }
        return ++i, t;
      });
  };
  give(stream.device_index(), stream.id(), std::move(item));
  count(kOperatorsAhead);
  return true;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack given(stack->end() - arguments.size(), stack->end());
  torch::jit::drop(*stack, arguments.size());

  Crossing crossing;
  for (auto& value : given) {
    each_tensor(value, [&](const at::Tensor& t) { return crossing.find_device(t), t; });
    if (crossing.device < 0 && value.isDevice()) crossing.device = device_of(value.toDevice().index()).index();
  }
  if (crossing.device < 0) crossing.device = device_now;
  c10::DeviceGuard on_device(device_of(crossing.device));
  c10::Stream stream = current(crossing.device);
  count(kOperators);
  if (world().lag && comes_later(op, given, stream, stack)) return;
  if (!world().lag || !gives_view(schema)) drain(stream.device_index(), stream.id());
  if (makes_host_wait(schema, given)) count(kOperatorWaits);

  Twin twin;
  for (size_t i = 0; i < given.size(); ++i) {
    bool is_written = (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) ||
                      arguments[i].name().rfind("running_", 0) == 0;  // batch norm writes them and does not say so
    each_tensor(given[i], [&](const at::Tensor& t) {
      bool astray = t.defined() && t.is_cpu() && t.dim() > 0 && schema.name().find("index") == std::string::npos;
      TORCH_CHECK(!astray, schema.name(), ": argument '", arguments[i].name(), "' is on the CPU, others on sim");
      return crossing.to_cpu(t, is_written);
    });
    twin.enter(arguments[i], given[i], crossing.device);
    if (given[i].isDevice()) given[i] = c10::Device(c10::kCPU);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &given);
  twin.leave();

  crossing.write_arguments();
  for (auto& value : given) {
    each_tensor(value, [&](const at::Tensor& t) { return crossing.to_device(t); });
    stack->push_back(value);
  }
  crossing.give_results(stream);
}

// ---- operators that torch composes otherwise where there is no kernel of the CPU's

// Not the fused one, so that the numbers are the CPU's.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.numel() == 0) return input;
  return input.mul(p == 1 ? at::empty_like(input).zero_() : at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

using Maybe = std::optional<at::Tensor>;

at::Tensor with(const at::Tensor& gates, const Maybe& bias) { return bias && bias->defined() ? gates + *bias : gates; }

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& in, const at::Tensor& hidden, const at::Tensor& before,
                                            const Maybe& in_bias, const Maybe& hidden_bias) {
  auto i = with(in, in_bias).chunk(3, 1), h = with(hidden, hidden_bias).chunk(3, 1);
  at::Tensor reset = (h[0] + i[0]).sigmoid(), update = (h[1] + i[1]).sigmoid();
  at::Tensor fresh = (i[2] + h[2] * reset).tanh();
  return {(before - fresh) * update + fresh, at::empty_like(in)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& in, const at::Tensor& hidden,
                                                         const at::Tensor& before, const Maybe& in_bias,
                                                         const Maybe& hidden_bias) {
  auto gates = (with(in, in_bias) + with(hidden, hidden_bias)).chunk(4, 1);
  at::Tensor cell = gates[1].sigmoid() * before + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cell.tanh(), cell, at::empty_like(in)};
}

// ---- autocast: the operators that CUDA's casts down, and the best known of those it casts up

void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const at::Tensor& t) { return at::autocast::cached_cast(dtype, t, kType); });
  op.callBoxed(stack);
}

void cast_down(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(kType));
}

void cast_up(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_and_call(op, stack, c10::kFloat); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : {"linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d",
                           "conv3d", "conv_transpose1d", "conv_transpose2d.input", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_down>());
  for (const char* name : {"softmax.int", "log_softmax.int", "layer_norm", "native_layer_norm", "group_norm", "exp",
                           "log", "rsqrt", "mse_loss", "nll_loss", "smooth_l1_loss", "cosine_similarity", "cumsum"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_up>());
}

// Copies read conjugate and negative views themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", dropout);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, Sizes)>(at::native::view));
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  std::set<std::string> ours{"empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "resize_",
                             "set_", "set_.source_Tensor", "set_.source_Storage",
                             "set_.source_Storage_storage_offset", "record_stream"};
  // torch's own compositions come before a fallback, with other numbers than the CPU's kernels.
  using Key = c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema()) continue;
    if (op->hasKernelForDispatchKey(Key::Meta)) structured().emplace(name.name, name.overload_name);
    std::string own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    bool composed = op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
                    op->hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
    bool convolves = own == "convolution" || own == "convolution_backward";
    if ((composed && op->hasKernelForDispatchKey(Key::CPU) && !ours.count(own)) || convolves)
      m.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

void seed(int64_t device, int64_t seed) {
  at::Generator generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

void set_rng_state(int64_t device, const at::Tensor& state) {
  at::Generator(default_generator(device)).set_state(state);
}

TORCH_LIBRARY(sim, m) {
  m.def("seed", seed);
  m.def("get_rng_state", [](int64_t device) { return default_generator(device).get_state(); });
  m.def("set_rng_state", set_rng_state);
}

const AtExit at_exit;

}  // namespace sim

// ---- what the tests' Python calls

extern "C" {
void sim_capacity(int64_t bytes) {
  auto& memory = sim::DeviceMemory::the();
  sim::Lock hold(memory.lock);
  memory.capacity = bytes;
}
void sim_delays(double most_seconds, uint64_t seed) { sim::set_delays(most_seconds, seed); }
void sim_ahead(int64_t events) {
  sim::Lock lock(sim::world().lock);
  sim::world().ahead = events;
}
void sim_lag(uint64_t items) { sim::world().lag = items; }
// Begins a log of copies; gives the numbers of the log before, two for each copy, and how many there are.
int64_t sim_log(int on, int64_t* into, int64_t room) {
  sim::Lock lock(sim::world().lock);
  auto& log = sim::world().log;
  int64_t count = log.size();
  std::copy_n(log.begin(), std::min(room, count), into);
  if (room >= count) log.clear();
  sim::world().logs = on != 0;
  return count;
}
void sim_poison(int on) { sim::world().poison = on != 0; }
int64_t sim_hold(int device, int64_t stream) { return sim::hold(device, stream); }
void sim_open(int64_t gate) { sim::open_gate(gate); }
int64_t sim_count(int which) { return sim::world().counts[which]; }
int sim_forked() { return sim::world().forked; }
int64_t sim_pinned_bytes() { return sim::PinnedMemory::the().allocated.current; }
}
