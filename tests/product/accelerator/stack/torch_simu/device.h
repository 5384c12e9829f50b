// Simulated devices: memory on the host, with the device type PrivateUse1.

#pragma once

#include <ATen/ATen.h>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace simu {

constexpr auto kSimu = c10::DeviceType::PrivateUse1;

// Sets what the driver says: the number of each visible device on the machine, their memory in bytes, and the folder in
// which each process states its memory.
void set_driver(std::vector<int64_t> numbers, int64_t memory_bytes, std::string folder);

int64_t device_count();
int64_t current_device();
void set_device(int64_t index);
// Opens the driver in this process. Like real drivers, it does not survive a fork.
void open_driver();
bool is_open();

struct Memory {
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0;
};

Memory memory(int64_t index);
void reset_peak(int64_t index);
void empty_cache(int64_t index);
// The bytes that all processes use on a device.
int64_t used_bytes(int64_t index);
int64_t total_bytes();

const at::Generator& default_generator(int64_t index);

// Returns a CPU tensor on the memory of `tensor`, which may also be a tensor on the CPU.
at::Tensor on_host(const at::Tensor& tensor);

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
