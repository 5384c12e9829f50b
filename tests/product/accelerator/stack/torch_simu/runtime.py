"""The module `torch.simu`: devices, memory, streams and random numbers, as in torch.cuda.

Its C++ part is in the folder in the variable SIMU_BUILD.

The driver's folder, in the variable SIMU_DRIVER, has a file `devices.json` with the `count` of devices on the machine,
their `name` and `memory_bytes`. SIMU_VISIBLE_DEVICES restricts the devices to a list of their numbers. Kernels end
before their calls return, so `synchronize` and waiting for streams and events do nothing.
"""

import contextlib
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch


def _load() -> ModuleType:
    path = os.path.join(os.environ["SIMU_BUILD"], "torch_simu_c.so")
    spec = importlib.util.spec_from_file_location("torch_simu_c", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extension = _load()


def _read_driver():
    """Read the devices of the machine, and select the visible ones. As in CUDA, an unknown number ends the list."""
    folder = Path(os.environ.get("SIMU_DRIVER", "/var/run/simu"))
    try:
        driver = json.loads((folder / "devices.json").read_text("utf-8"))
    except OSError:
        return {"count": 0}
    numbers = list(range(driver["count"]))
    if (text := os.environ.get("SIMU_VISIBLE_DEVICES")) is not None:
        visible = []
        for word in text.split(","):
            if not word.strip().isdigit() or int(word) not in numbers:
                break
            visible.append(int(word))
        numbers = visible
    extension.set_driver(numbers, driver["memory_bytes"], str(folder))
    return driver


_driver = _read_driver()


def _index(device=None):
    if device is None or (isinstance(device, int) and device < 0):
        return extension.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return extension.current_device() if index is None else index


def is_available():
    return extension.device_count() > 0


def is_initialized():
    return extension.is_open()


def init():
    extension.open_driver()


def _lazy_init():
    extension.open_driver()


def _lazy_call(call, **_):
    call()


def _is_in_bad_fork():
    return False


def device_count():
    return extension.device_count()


def current_device():
    return extension.current_device()


def set_device(device):
    extension.set_device(_index(device))


def synchronize(device=None):
    extension.open_driver()


def get_device_name(device=None):
    return _driver["name"]


def get_device_properties(device=None):
    return SimpleNamespace(name=_driver["name"], total_memory=_driver["memory_bytes"], multi_processor_count=1)


def get_device_capability(device=None):
    return (1, 0)


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


def is_bf16_supported():
    return True


class device:
    """Selects a device within a `with` block."""

    def __init__(self, device):
        self._index = None if device is None else _index(device)

    def __enter__(self):
        self._before = extension.current_device()
        if self._index is not None:
            extension.set_device(self._index)

    def __exit__(self, *_):
        extension.set_device(self._before)


def memory_allocated(device=None):
    return extension.memory(_index(device)).allocated


def max_memory_allocated(device=None):
    return extension.memory(_index(device)).peak_allocated


def memory_reserved(device=None):
    return extension.memory(_index(device)).reserved


def max_memory_reserved(device=None):
    return extension.memory(_index(device)).peak_reserved


def reset_peak_memory_stats(device=None):
    extension.reset_peak(_index(device))


def memory_stats(device=None):
    memory = extension.memory(_index(device))
    return {
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak_allocated,
        "reserved_bytes.all.current": memory.reserved,
        "reserved_bytes.all.peak": memory.peak_reserved,
    }


def mem_get_info(device=None):
    total = extension.total_bytes()
    return total - extension.used_bytes(_index(device)), total


def empty_cache():
    for index in range(extension.device_count()):
        extension.empty_cache(index)


class Stream(torch.Stream):
    """A queue of kernels. It is always empty."""

    def __new__(cls, device=None, priority=0):
        return super().__new__(cls, device=torch.device("simu", _index(device)), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):
    """Return a point in time."""
    return torch.Event("simu", enable_timing=enable_timing)


def current_stream(device=None):
    return Stream(device)


def default_stream(device=None):
    return Stream(device)


def set_stream(stream):
    pass


@contextlib.contextmanager
def stream(stream):
    yield


class _Generators:
    def __getitem__(self, index):
        return extension.default_generator(index)


default_generators = _Generators()


def get_rng_state(device="simu"):
    return extension.default_generator(_index(device)).get_state()


def set_rng_state(new_state, device="simu"):
    extension.default_generator(_index(device)).set_state(new_state)


def manual_seed(seed):
    extension.default_generator(_index()).manual_seed(seed)


def manual_seed_all(seed):
    """Seed all devices. torch.manual_seed calls it, in processes that use no device, too."""
    if is_initialized():
        for index in range(device_count()):
            extension.default_generator(index).manual_seed(seed)


random = SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed)
