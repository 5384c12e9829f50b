// All operators of simulated devices: the CPU's kernels, on the same memory.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"

namespace simu {

namespace {

c10::Device current() {
  return {kSimu, static_cast<c10::DeviceIndex>(current_device())};
}

c10::Device with_index(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : current();
}

void delete_storage(void* storage) {
  delete static_cast<c10::Storage*>(storage);
}

// Turns arguments into tensors on the CPU, and results of the CPU's kernel into tensors on the device.
class Call {
 public:
  // Returns a CPU tensor on the memory of `tensor`. Views and in-place operations share a storage on the CPU, too.
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    for (const auto& [host, own] : tensors_)
      if (own.is_same(tensor))
        return host;
    at::Tensor host = tensor.device().type() == kSimu ? alias(tensor) : tensor;
    tensors_.emplace_back(host, tensor);
    return host;
  }

  // Returns the device's tensor for a result of the CPU's kernel.
  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined())
      return host;
    for (const auto& [known, own] : tensors_)
      if (known.is_same(host))
        return own;
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        device_storage(host.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    return result;
  }

  // Applies what the CPU's kernel did to the form of its arguments, such as a resized result.
  void update() {
    for (auto& [host, own] : storages_) {
      if (host.data() != own.data() && own.device().type() == kSimu) {
        own.set_data_ptr_noswap(taken(host));
        own.set_nbytes(host.nbytes());
      }
    }
    for (auto& [host, own] : tensors_)
      if (own.device().type() == kSimu && (host.sizes() != own.sizes() || host.strides() != own.strides()))
        own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  // Sets the device of the call, which all tensors must share.
  void set_device(c10::Device device, const char* name) {
    TORCH_CHECK(
        !device_ || *device_ == device, "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_, " and ", device, "! (", name, ")");
    device_ = device;
  }

  c10::Device device() const {
    return device_ ? *device_ : current();
  }

 private:
  at::Tensor alias(const at::Tensor& tensor) {
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      impl->set_wrapped_number(true);
    return host;
  }

  c10::Storage host_storage(const c10::Storage& own) {
    for (const auto& [host, known] : storages_)
      if (known.is_alias_of(own))
        return host;
    c10::DataPtr data(own.mutable_data(), new c10::Storage(own), &delete_storage, c10::Device(c10::DeviceType::CPU));
    auto* allocator = c10::GetAllocator(c10::DeviceType::CPU);
    c10::Storage host(c10::Storage::use_byte_size_t(), own.nbytes(), std::move(data), allocator, /*resizable=*/true);
    storages_.emplace_back(host, own);
    return host;
  }

  c10::Storage device_storage(const c10::Storage& host) {
    for (const auto& [known, own] : storages_)
      if (known.is_alias_of(host))
        return own;
    auto* allocator = c10::GetAllocator(kSimu);
    c10::Storage own(c10::Storage::use_byte_size_t(), host.nbytes(), taken(host), allocator, /*resizable=*/true);
    storages_.emplace_back(host, own);
    return own;
  }

  // Takes the memory out of a storage that a kernel allocated. Other threads of a kernel allocate on the host: a copy.
  c10::DataPtr taken(const c10::Storage& host) {
    if (host.nbytes() == 0)
      return {nullptr, device()};
    if (!is_device_memory(host.data_ptr())) {
      c10::OptionalDeviceGuard guard(device());
      auto copy = c10::GetAllocator(kSimu)->allocate(host.nbytes());
      std::memcpy(copy.mutable_get(), host.data(), host.nbytes());
      return copy;
    }
    auto data = const_cast<c10::Storage&>(host).set_data_ptr(
        c10::DataPtr(host.mutable_data(), c10::Device(c10::DeviceType::CPU)));
    c10::DataPtr own(data.get(), data.get_context(), data.get_deleter(), device());
    data.release_context();
    return own;
  }

  std::optional<c10::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

// Calls `work` on each tensor in a value, and returns the value with the results.
template <typename Work>
c10::IValue mapped(const c10::IValue& value, Work work) {
  if (value.isTensor())
    return work(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(work(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(work(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// Index tensors and single numbers may be on the CPU, as for other accelerators.
bool may_be_on_host(const at::Tensor& tensor, const std::string& name) {
  return tensor.dim() == 0 || name.find("index") != std::string::npos;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  Call call;
  for (size_t i = first; i < stack->size(); ++i) {
    mapped((*stack)[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.device().type() == kSimu)
        call.set_device(tensor.device(), schema.name().c_str());
      else if (tensor.defined() && !may_be_on_host(tensor, schema.name()))
        call.set_device(tensor.device(), schema.name().c_str());
      return tensor;
    });
  }
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto& type = *schema.arguments()[i - first].type();
    if (value.isDevice() && value.toDevice().type() == kSimu) {
      call.set_device(with_index(value.toDevice()), schema.name().c_str());
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().type() == kSimu)
        value = host_generator(value.toGenerator());
    } else if (value.isNone() && type.str() == "Generator?") {
      value = host_generator(default_generator(call.device().index()));
    } else {
      value = mapped(value, [&](const at::Tensor& tensor) { return call.to_host(tensor); });
    }
  }
  {
    HostAllocations allocations(call.device().index());
    at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.update();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor& tensor) { return call.to_device(tensor); });
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kSimu), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kSimu), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(
    at::Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr)
    impl->set_sizes_and_strides(size, c10::contiguous_strides(size), offset);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, c10::Storage storage) {
  auto length = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage(tensor, std::move(storage), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  return Call().to_host(tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
}

}  // namespace simu
