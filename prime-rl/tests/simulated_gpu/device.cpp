// A device "cuda" for a CPU build of PyTorch: its memory is the host's, and its operators are the CPU's.
//
// PyTorch itself then does what it does with a GPU: it moves tensors, checks devices, frees storages, runs backward passes
// in a thread of the device. What a real GPU would refuse is an error here too: tensors of two devices in one operator, a
// wait where waiting is forbidden. Memory that nobody has written holds NaN.
//
// Not simulated: streams that run at the same time, rounding, speed, out of memory.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace simulated {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IntArrayRef;

constexpr int UNWRITTEN = 0xFF;  // NaN in every floating-point dtype, -1 in integers

std::atomic<DeviceIndex> current{0};
std::atomic<DeviceIndex> count{1};
std::atomic<bool> is_waiting_forbidden{false};

Device gpu() { return Device(c10::kCUDA, current); }

void waits(const std::string& what) {
  TORCH_CHECK(!is_waiting_forbidden, "called a synchronizing CUDA operation: ", what);
}

// ---- memory ----

class Blocks {
 public:
  void* take(size_t bytes, int content) {
    void* block = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    TORCH_CHECK(block, "out of host memory");
    std::memset(block, content, bytes);
    std::lock_guard<std::mutex> guard(mutex_);
    sizes_[block] = bytes;
    held_ += bytes;
    peak_ = std::max(peak_, held_);
    return block;
  }

  void give_back(void* block) {
    if (!block) return;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto found = sizes_.find(block);
      held_ -= found->second;
      std::memset(block, UNWRITTEN, found->second);
      sizes_.erase(found);
    }
    std::free(block);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = sizes_.upper_bound(const_cast<void*>(address));
    if (next == sizes_.begin()) return false;
    --next;
    return static_cast<const char*>(address) < static_cast<const char*>(next->first) + std::max<size_t>(next->second, 1);
  }

  size_t held() { std::lock_guard<std::mutex> guard(mutex_); return held_; }
  size_t peak() { std::lock_guard<std::mutex> guard(mutex_); return peak_; }
  void forget_peak() { std::lock_guard<std::mutex> guard(mutex_); peak_ = held_; }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
  size_t held_ = 0, peak_ = 0;
};

// Never destroyed: tensors may outlive static objects.
Blocks& of_gpu = *new Blocks;
Blocks& pinned = *new Blocks;

void free_of_gpu(void* block) { of_gpu.give_back(block); }
void free_pinned(void* block) { pinned.give_back(block); }

struct GpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes ? of_gpu.take(bytes, UNWRITTEN) : nullptr;
    return {block, block, &free_of_gpu, gpu()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_of_gpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = pinned.take(bytes, UNWRITTEN);
    return {block, block, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

GpuAllocator gpu_allocator;
PinnedAllocator pinned_allocator;

// ---- devices and streams: there is one stream, and everything in it is done at once ----

c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, gpu()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device to) const override {
    Device before = gpu();
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return gpu(); }
  void setDevice(Device to) const override {
    if (!to.has_index()) return;
    TORCH_CHECK(to.index() < count, "CUDA error: invalid device ordinal");
    current = to.index();
  }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (to.has_index()) current = to.index();
  }
  c10::Stream getStream(Device) const noexcept override { return only_stream(); }
  c10::Stream getNewStream(Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  DeviceIndex deviceCount() const noexcept override { return count; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace simulated

namespace at {  // the macro wants it here

struct SimulatedHooks final : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated::count; }
  int getNumGPUs() const override { return simulated::count; }
  DeviceIndex current_device() const override { return simulated::current; }
  DeviceIndex getCurrentDevice() const override { return simulated::current; }
  void setCurrentDevice(DeviceIndex to) const override { simulated::current = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return simulated::current.exchange(to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return simulated::current.exchange(to); }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return simulated::pinned.holds(address); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(Device(kCPU));
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks);

}  // namespace at

namespace simulated {

// ---- operators ----

bool is_on_gpu(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// A CPU tensor over the same memory; a tensor of the CPU as it is.
Tensor on_host(const Tensor& tensor) {
  if (!is_on_gpu(tensor)) return tensor;
  c10::Storage kept = tensor.storage();
  c10::DataPtr data(kept.mutable_data(), new c10::Storage(kept), [](void* storage) { delete static_cast<c10::Storage*>(storage); }, Device(c10::kCPU));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kept.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_neg()) alias.unsafeGetTensorImpl()->_set_neg(true);
  return alias;
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(size, stride, &gpu_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, &gpu_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor to_gpu(const Tensor& host) {
  at::NoGradGuard no_grad;
  Tensor copy = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, {}, {});
  on_host(copy).copy_(host);
  return copy;
}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr data = gpu_allocator.allocate(bytes);
  if (bytes && storage->nbytes()) std::memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr(std::move(data));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(self, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& copy_(Tensor& self, const Tensor& from, bool is_non_blocking) {
  at::NoGradGuard no_grad;
  if (self.is_cuda() != from.is_cuda()) {
    const Tensor& host = self.is_cuda() ? from : self;
    if (!is_non_blocking || !pinned.holds(host.storage().data())) waits("a copy between host and device");
  }
  on_host(self).copy_(on_host(from).detach());
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  waits("aten::item");
  return on_host(self).item();
}

Tensor& set_(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

// Attention as products and a softmax, because PyTorch's other kernels are for real GPUs.
int64_t choose_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

using Values = std::vector<c10::IValue>;

// Calls `see` with each tensor of an argument or result.
template <class See>
void each_tensor(const c10::IValue& value, See see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) see(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) see(*tensor);
    }
  }
}

// The value with every tensor of it replaced.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(tensor.defined() ? change(tensor) : tensor);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value;
}

void check_devices(const c10::FunctionSchema& schema, const Values& arguments) {
  // These take indices of the host for tensors of the GPU.
  static const std::set<std::string> takes_indices = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  bool has_gpu = false, has_cpu = false;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      has_gpu |= is_on_gpu(tensor);
      has_cpu |= tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0;
    });
  }
  TORCH_CHECK(!(has_gpu && has_cpu) || takes_indices.count(schema.name()),
              "Expected all tensors to be on the same device, but ", schema.name(), " got some of the CPU and some of the GPU");
}

// What an in-place or `out=` operator returns: its own argument, in the size that the operator gave it.
c10::IValue written_argument(const c10::AliasInfo& alias, const c10::FunctionSchema& schema, const Values& arguments, const Values& on_hosts) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* own = schema.arguments()[i].alias_info();
    if (!own || !own->isWrite() || !(*own == alias)) continue;
    if (arguments[i].isTensor() && is_on_gpu(arguments[i].toTensor())) {
      const Tensor &written = arguments[i].toTensor(), &computed = on_hosts[i].toTensor();
      if (!written.sizes().equals(computed.sizes())) {
        at::NoGradGuard no_grad;
        resize_(written, computed.sizes(), {});
        on_host(written).copy_(computed);
      }
    }
    return arguments[i];
  }
  TORCH_CHECK(false, schema.name(), " writes to none of its arguments");
}

// A result of the CPU as a tensor of the GPU: a view of the argument whose memory it shares, or a copy.
Tensor brought_back(const Tensor& computed, bool may_be_view, const Values& arguments) {
  Tensor base;
  if (may_be_view) {
    for (const auto& argument : arguments) {
      each_tensor(argument, [&](const Tensor& tensor) {
        if (is_on_gpu(tensor) && tensor.storage().data() == computed.storage().data()) base = tensor;
      });
    }
  }
  if (!base.defined()) return to_gpu(computed);
  TORCH_CHECK(base.scalar_type() == computed.scalar_type(), "a view in another dtype is not simulated");
  return at::native::as_strided_tensorimpl(base, computed.sizes(), computed.strides(), computed.storage_offset());
}

// Every operator without a function above: the CPU's computes on the GPU's memory.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> wait = {"aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_dim", "aten::_unique2"};
  const auto& schema = op.schema();
  if (wait.count(schema.name())) waits(schema.name());
  const size_t num_arguments = schema.arguments().size();
  const Values arguments(stack->end() - num_arguments, stack->end());
  check_devices(schema, arguments);
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[stack->size() - num_arguments + i];
    value = value.isDevice() ? c10::IValue(Device(c10::kCPU)) : with_tensors(value, on_host);
  }
  const Values on_hosts(stack->end() - num_arguments, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t num_results = schema.returns().size();
  for (size_t i = 0; i < num_results; ++i) {
    auto& value = (*stack)[stack->size() - num_results + i];
    const auto* alias = schema.returns()[i].alias_info();
    value = alias && alias->isWrite()
        ? written_argument(*alias, schema, arguments, on_hosts)
        : with_tensors(value, [&](const Tensor& tensor) { return brought_back(tensor, alias != nullptr, arguments); });
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(view));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
}

// ---- for Python ----

void set_device(int64_t index) { Guard().setDevice(Device(c10::kCUDA, static_cast<DeviceIndex>(index))); }
int64_t current_device() { return current; }
void set_device_count(int64_t devices) { count = static_cast<DeviceIndex>(devices); }
int64_t memory(bool at_peak) { return static_cast<int64_t>(at_peak ? of_gpu.peak() : of_gpu.held()); }
void forget_peak() { of_gpu.forget_peak(); }
void forbid_waiting(bool is_forbidden) { is_waiting_forbidden = is_forbidden; }

TORCH_LIBRARY(simulated_gpu, library) {
  library.def("on_host(Tensor self) -> Tensor", TORCH_FN(on_host));
  library.def("to_gpu(Tensor self) -> Tensor", TORCH_FN(to_gpu));
  library.def("resize_storage(Tensor self, int bytes) -> ()", TORCH_FN(resize_storage));
  library.def("set_device(int index) -> ()", TORCH_FN(set_device));
  library.def("current_device() -> int", TORCH_FN(current_device));
  library.def("set_device_count(int devices) -> ()", TORCH_FN(set_device_count));
  library.def("memory(bool at_peak) -> int", TORCH_FN(memory));
  library.def("forget_peak() -> ()", TORCH_FN(forget_peak));
  library.def("forbid_waiting(bool is_forbidden) -> ()", TORCH_FN(forbid_waiting));
}

struct AtLoad {
  AtLoad() {
    c10::SetAllocator(c10::kCUDA, &gpu_allocator, 1);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math);
  }
} at_load;

}  // namespace simulated
