// The driver and the runtime of simulated devices: memory, the current device, streams and random numbers.

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <unordered_set>

namespace simu {

namespace {

constexpr int64_t kSegment = 2 << 20;  // the allocator reserves memory in steps of this size
constexpr size_t kHeader = 64;         // before each block; keeps the alignment that CPU kernels expect
constexpr int64_t kContext = 64 << 20; // what a process uses on a device before its first tensor

// Stands before each block, also before those that the host allocates, because both have one deleter.
struct Header {
  int64_t bytes;
  int64_t device; // -1: memory of the host
};

struct Device {
  Memory memory;
  int file = -1; // states what this process uses
  at::Generator generator;
};

std::mutex mutex;
std::vector<int64_t> numbers;
int64_t memory_bytes = 0;
std::string folder;
std::deque<Device> devices;
pid_t owner = 0; // the process that opened the driver
thread_local int64_t current = 0;
thread_local int64_t host_allocations_on = -1;

std::filesystem::path folder_of(int64_t index) {
  return std::filesystem::path(folder) / std::to_string(numbers.at(index));
}

void state_usage(int64_t index) {
  auto& device = devices[index];
  if (device.file < 0) {
    std::filesystem::create_directories(folder_of(index));
    auto path = folder_of(index) / std::to_string(getpid());
    device.file = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    flock(device.file, LOCK_EX | LOCK_NB); // until this process ends
  }
  char text[32];
  int length = snprintf(text, sizeof text, "%20ld\n", static_cast<long>(kContext + device.memory.reserved));
  TORCH_CHECK(pwrite(device.file, text, length, 0) == length, "simu: cannot state the memory in use");
}

int64_t others_bytes(int64_t index) {
  int64_t sum = 0;
  if (!std::filesystem::is_directory(folder_of(index)))
    return 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of(index))) {
    if (entry.path().filename() == std::to_string(getpid()))
      continue;
    int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (flock(file, LOCK_SH | LOCK_NB) == 0)
      unlink(entry.path().c_str()); // its process has ended
    else {
      int64_t bytes = 0;
      std::ifstream(entry.path()) >> bytes;
      sum += bytes;
    }
    close(file);
  }
  return sum;
}

int64_t rounded(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Reserves memory for `bytes` more, or throws torch's OutOfMemoryError. Call it with the mutex.
void reserve(int64_t index, int64_t bytes) {
  auto& memory = devices[index].memory;
  int64_t needed = memory.allocated + bytes;
  if (needed > memory.reserved) {
    int64_t wanted = rounded(needed, kSegment), free = memory_bytes - others_bytes(index) - kContext;
    TORCH_CHECK_WITH(
        OutOfMemoryError, wanted <= free,
        "Simu out of memory. Tried to allocate ", bytes, " bytes. Device ", index, " has a total capacity of ",
        memory_bytes, " bytes of which ", std::max<int64_t>(free - memory.reserved, 0), " bytes are free; ",
        memory.allocated, " bytes are allocated by torch.");
    memory.reserved = wanted;
    memory.peak_reserved = std::max(memory.peak_reserved, wanted);
    state_usage(index);
  }
  memory.allocated = needed;
  memory.peak_allocated = std::max(memory.peak_allocated, needed);
}

Header* header_of(const void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(const_cast<void*>(data)) - kHeader);
}

void* allocate(int64_t index, size_t bytes) {
  if (bytes == 0)
    return nullptr;
  int64_t size = rounded(static_cast<int64_t>(bytes), index < 0 ? kHeader : 512);
  if (index >= 0) {
    open_driver();
    std::lock_guard<std::mutex> lock(mutex);
    reserve(index, size);
  }
  void* start = std::aligned_alloc(kHeader, size + kHeader);
  TORCH_CHECK(start != nullptr, "can't allocate memory: the host has less than ", bytes, " bytes");
  *static_cast<Header*>(start) = Header{size, index};
  return static_cast<char*>(start) + kHeader;
}

void release(void* data) {
  if (data == nullptr)
    return;
  auto* header = header_of(data);
  if (header->device >= 0) {
    std::lock_guard<std::mutex> lock(mutex);
    devices[header->device].memory.allocated -= header->bytes;
  }
  std::free(header);
}

// The allocator never returns memory to the driver before `emptyCache`, and has no fragmentation.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = simu::allocate(current, bytes);
    return {data, data, &release, c10::Device(kSimu, static_cast<c10::DeviceIndex>(current))};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override {
    return is_open();
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int64_t index = 0; index < device_count(); ++index)
      empty_cache(index);
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto now = memory(index);
    stats.allocated_bytes[0].current = now.allocated;
    stats.allocated_bytes[0].peak = now.peak_allocated;
    stats.reserved_bytes[0].current = now.reserved;
    stats.reserved_bytes[0].peak = now.peak_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    reset_peak(index);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {static_cast<size_t>(total_bytes() - used_bytes(index)), static_cast<size_t>(total_bytes())};
  }
};

DeviceMemory device_memory;

// Replaces torch's CPU allocator: what CPU kernels allocate for a device is memory of the device.
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = simu::allocate(host_allocations_on, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

HostMemory host_memory;

struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::unordered_set<const void*> pinned;
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

PinnedMemory pinned_memory;

void unpin(void* data) {
  std::lock_guard<std::mutex> lock(pinned_memory.mutex);
  pinned_memory.pinned.erase(data);
  std::free(data);
}

c10::DataPtr PinnedMemory::allocate(size_t bytes) {
  void* data = std::aligned_alloc(kHeader, rounded(std::max<size_t>(bytes, 1), kHeader));
  std::lock_guard<std::mutex> lock(mutex);
  pinned.insert(data);
  return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const {
  return &unpin;
}

// A generator of a device. Its numbers are those of a CPU generator, `host`.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;
  explicit DeviceGenerator(int64_t index, uint64_t seed)
      : c10::GeneratorImpl(
            {kSimu, static_cast<c10::DeviceIndex>(index)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index(), 0);
    copy->host = host.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return is_open();
  }
  void init() const override {
    open_driver();
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index, c10::default_rng_seed_val);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kSimu, static_cast<c10::DeviceIndex>(header_of(data)->device)};
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_memory.mutex);
    return pinned_memory.pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr data;
    if (bytes > 0) {
      void* memory = simu::allocate(storage.device().index(), bytes);
      data = c10::DataPtr(memory, memory, &release, storage.device());
      if (storage.data() != nullptr)
        std::memcpy(memory, storage.data(), std::min(bytes, storage.nbytes()));
    } else {
      data = c10::DataPtr(nullptr, storage.device());
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// Kernels run on the host and end before their calls return, so streams and events have nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::DeviceType type() const override {
    return kSimu;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kSimu, static_cast<c10::DeviceIndex>(current)};
  }
  void setDevice(c10::Device device) const override {
    set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device);
  }
  c10::Stream exchangeStream(c10::Stream before) const override {
    return stream(before.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<std::chrono::steady_clock::time_point*>(*event);
    *event = new std::chrono::steady_clock::time_point(std::chrono::steady_clock::now());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    auto time = [](void* event) { return *static_cast<std::chrono::steady_clock::time_point*>(event); };
    return std::chrono::duration<double, std::milli>(time(end) - time(start)).count();
  }
};

Hooks hooks;
[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kSimu, &device_memory);
  c10::SetAllocator(c10::DeviceType::CPU, &host_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

HostAllocations::HostAllocations(int64_t index) : before_(host_allocations_on) {
  host_allocations_on = index;
}

HostAllocations::~HostAllocations() {
  host_allocations_on = before_;
}

bool is_device_memory(const c10::DataPtr& data) {
  return data.get() != nullptr && data.get_deleter() == &release && header_of(data.get())->device >= 0;
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

void set_driver(std::vector<int64_t> visible, int64_t bytes, std::string state) {
  numbers = std::move(visible);
  memory_bytes = bytes;
  folder = std::move(state);
}

int64_t device_count() {
  return static_cast<int64_t>(numbers.size());
}

int64_t current_device() {
  open_driver();
  return current;
}

void set_device(int64_t index) {
  open_driver();
  TORCH_CHECK(index >= 0 && index < device_count(), "simu: invalid device ordinal ", index);
  current = index;
}

bool is_open() {
  return owner == getpid();
}

void open_driver() {
  std::lock_guard<std::mutex> lock(mutex);
  if (is_open())
    return;
  TORCH_CHECK(owner == 0, "Cannot re-initialize Simu in forked subprocess");
  TORCH_CHECK(device_count() > 0, "simu: no device is visible");
  owner = getpid();
  for (int64_t index = 0; index < device_count(); ++index) {
    devices.emplace_back();
    devices.back().generator = at::make_generator<DeviceGenerator>(index, c10::default_rng_seed_val);
  }
}

Memory memory(int64_t index) {
  open_driver();
  std::lock_guard<std::mutex> lock(mutex);
  return devices.at(index).memory;
}

void reset_peak(int64_t index) {
  open_driver();
  std::lock_guard<std::mutex> lock(mutex);
  auto& memory = devices.at(index).memory;
  memory.peak_allocated = memory.allocated;
  memory.peak_reserved = memory.reserved;
}

void empty_cache(int64_t index) {
  open_driver();
  std::lock_guard<std::mutex> lock(mutex);
  auto& memory = devices.at(index).memory;
  if (int64_t needed = rounded(memory.allocated, kSegment); needed != memory.reserved) {
    memory.reserved = needed;
    state_usage(index);
  }
}

int64_t used_bytes(int64_t index) {
  open_driver();
  std::lock_guard<std::mutex> lock(mutex);
  auto& device = devices.at(index);
  return others_bytes(index) + (device.file < 0 ? 0 : kContext + device.memory.reserved);
}

int64_t total_bytes() {
  return memory_bytes;
}

const at::Generator& default_generator(int64_t index) {
  open_driver();
  return devices.at(index).generator;
}

}  // namespace simu
