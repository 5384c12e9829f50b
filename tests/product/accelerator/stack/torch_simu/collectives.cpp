// The collective library of simulated devices, simuccl: gloo, on the same memory. Also the Python module.
// The sums of an all-reduce can also have 8 bits, or be wrong.

#include <unistd.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include "device.h"

namespace simu {

namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.device().type() == kSimu, "simuccl: the tensor is on ", tensor.device());
    hosts.push_back(simu::on_host(tensor));
  }
  return hosts;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& list : lists)
    hosts.push_back(on_host(list));
  return hosts;
}

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, double delay, int sums)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), delay_(delay), sums_(sums) {}

  const std::string getBackendName() const override {
    return "simuccl";
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_host(tensors);
    return gloo_->broadcast(hosts, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = delayed(tensors);
    auto work = gloo_->allreduce(hosts, options);
    if (sums_ == 0 || options.reduceOp != c10d::ReduceOp::SUM)
      return work;
    work->wait();
    hosts[0].copy_(sums_ == 1 ? hosts[0].to(at::kFloat8_e5m2) : hosts[0] * 2);
    return work;
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto hosts = on_host(tensors);
    return gloo_->allreduce_coalesced(hosts, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = on_host(tensors);
    return gloo_->reduce(hosts, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->allgather(targets, sources, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto hosts = delayed(Tensors{output, input});
    return gloo_->_allgather_base(hosts[0], hosts[1], options);
  }
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->allgather_into_tensor_coalesced(targets, sources, options);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->gather(targets, sources, options);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->scatter(targets, sources, options);
  }
  Work reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->reduce_scatter(targets, sources, options);
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto hosts = delayed(Tensors{output, input});
    return gloo_->_reduce_scatter_base(hosts[0], hosts[1], options);
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->reduce_scatter_tensor_coalesced(targets, sources, options);
  }
  Work alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto hosts = delayed(Tensors{output, input});
    return gloo_->alltoall_base(hosts[0], hosts[1], output_sizes, input_sizes, options);
  }
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto targets = on_host(outputs);
    auto sources = on_host(inputs);
    return gloo_->alltoall(targets, sources, options);
  }
  Work send(Tensors& tensors, int rank, int tag) override {
    auto hosts = on_host(tensors);
    return gloo_->send(hosts, rank, tag);
  }
  Work recv(Tensors& tensors, int rank, int tag) override {
    auto hosts = on_host(tensors);
    return gloo_->recv(hosts, rank, tag);
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    auto hosts = on_host(tensors);
    return gloo_->recvAnysource(hosts, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  Tensors delayed(const Tensors& tensors) const {
    usleep(static_cast<useconds_t>(1e6 * delay_));
    return on_host(tensors);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  double delay_;
  int sums_;
};

c10::intrusive_ptr<c10d::Backend> collectives(
    const c10::intrusive_ptr<c10d::Backend>& gloo, double delay, int sums) {
  return c10::make_intrusive<Collectives>(gloo, delay, sums);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Memory>(module, "Memory")
      .def_readonly("allocated", &Memory::allocated)
      .def_readonly("peak_allocated", &Memory::peak_allocated)
      .def_readonly("reserved", &Memory::reserved)
      .def_readonly("peak_reserved", &Memory::peak_reserved);
  module.def("set_driver", &set_driver);
  module.def("device_count", &device_count);
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("open_driver", &open_driver);
  module.def("is_open", &is_open);
  module.def("memory", &memory);
  module.def("reset_peak", &reset_peak);
  module.def("empty_cache", &empty_cache);
  module.def("used_bytes", &used_bytes);
  module.def("total_bytes", &total_bytes);
  module.def("default_generator", &default_generator);
  module.def("collectives", &collectives);
}

}  // namespace simu
