// What kernels need to know of the memory and the generators of simulated devices.

#pragma once

#include "device.h"

namespace simu {

// While it exists, this thread's allocations on the CPU are memory of a device.
class HostAllocations {
 public:
  explicit HostAllocations(int64_t index);
  ~HostAllocations();

 private:
  int64_t before_;
};

bool is_device_memory(const c10::DataPtr& data);
at::Generator host_generator(const at::Generator& generator);

}  // namespace simu
