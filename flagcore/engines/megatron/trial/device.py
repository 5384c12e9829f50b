"""The device of one rank: selecting it, synchronizing with it, its time (seconds) and memory (bytes), and a speed test.

On an accelerator the memory comes from torch's allocator and the driver. On a CPU `device_used_bytes` is the rank's
peak resident memory, and `peak_allocated_bytes` is the peak growth of anonymous memory since its process groups were
created. There is no reserved memory. The clock of a rank on a CPU is the time of its main thread, without waits for
other ranks.

Also replaces a missing GPU in trials on a CPU, and missing ranks in probes of a single rank. Megatron-core hard-codes
the device "cuda" in many functions. So the rank's process replaces a few functions of torch and Megatron; a comment
gives the reason for each. The replacements are plain functions. A torch function mode would be off during the backward
pass, in which recompute runs forward code.
"""

import ctypes
import functools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.testing._internal.distributed.fake_pg import FakeStore

from flagcore.engines.megatron.trial.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_EXACT_THRESHOLD, _FAST_THRESHOLD = 64 << 10, 32 << 20
"""Sizes in bytes from which the C library maps each block separately (mallopt(3)).

Such blocks are returned to the system when they are freed, so resident memory is exact. Smaller blocks are reused,
which is faster. `_FAST_THRESHOLD` is the library's maximum."""


class Cpu:
    """The host's CPU as the device of a rank."""

    device = torch.device("cpu")
    needs_memory_step = True
    """Whether the peaks are measured in an additional, untimed step (`training.memory_step`)."""

    def __init__(self) -> None:
        _set_mmap_threshold(_EXACT_THRESHOLD)
        self._peak_allocated = self._peak = 0
        self.set_baseline()

    def synchronize(self) -> None:
        """Do nothing, because a CPU does not work in the background."""

    def clock(self) -> float:
        """Return the seconds of processor time that this rank's own work has taken so far."""
        return time.thread_time()

    def set_baseline(self) -> None:
        """Exclude the memory that is allocated so far, such as that of process groups, from the measurements."""
        self.start_peak()
        self._baseline = _status_bytes("VmRSS") - _status_bytes("RssFile")

    def reset_after_build(self) -> None:
        """Do nothing, because on a CPU the peak is in training, not while the model is built."""

    def allocated_bytes(self) -> int:
        """Return the bytes of anonymous memory above the baseline, after freed blocks are returned to the system."""
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        return max(0, _status_bytes("VmRSS") - _status_bytes("RssFile") - self._baseline)

    def start_peak(self) -> None:
        """Reset the system's peak of resident memory, if the process has the permission to do so."""
        self._peak = max(self._peak, _status_bytes("VmHWM"))
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the peak bytes of anonymous memory above the baseline."""
        return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - self._baseline)

    def end_memory_measurement(self, peak: int) -> None:
        """Store `peak` as the peak of the run, and stop measuring memory."""
        self._peak_allocated = peak
        _set_mmap_threshold(_FAST_THRESHOLD)

    def memory(self) -> dict[str, int | None]:
        """Return the peaks so far in bytes, by their names in the metrics."""
        used = max(self._peak, _status_bytes("VmHWM"))
        return _memory(self._peak_allocated, None, used)


class Accelerator:
    """An accelerator as the device of a rank. It has a torch module, such as torch.cuda."""

    needs_memory_step = False

    def __init__(self, kind: str, rank: int) -> None:
        self._module: Any = getattr(torch, kind)
        index = rank % self._module.device_count()
        self._module.set_device(index)
        self.device = torch.device(kind, index)
        self._peak_allocated = 0

    def synchronize(self) -> None:
        self._module.synchronize()

    def clock(self) -> float:
        """Return the host's clock after the device has finished its work. The device works only for this rank."""
        self._module.synchronize()
        return time.perf_counter()

    def set_baseline(self) -> None:
        """Do nothing, because the allocator only counts tensors."""

    def reset_after_build(self) -> None:
        """Return cached blocks to the driver, and restart the measurement of peaks."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()

    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated())

    def start_peak(self) -> None:
        self._peak_allocated = max(self._peak_allocated, self.peak_bytes())
        self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated())

    def end_memory_measurement(self, peak: int) -> None:
        self._peak_allocated = max(self._peak_allocated, peak)

    def memory(self) -> dict[str, int | None]:
        """Return the allocator's peaks, and the memory that all processes currently use on the device, in bytes.

        The driver reports the memory of all processes.
        """
        free, total = self._module.mem_get_info()
        peak = max(self._peak_allocated, self.peak_bytes())
        return _memory(peak, self._module.max_memory_reserved(), total - free)


RankDevice: TypeAlias = Cpu | Accelerator


def open_device(kind: str, rank: int) -> RankDevice:
    """Return the device of the rank with the index `rank`. `kind` is torch's name of the device type."""
    return Cpu() if kind == "cpu" else Accelerator(kind, rank)


def _memory(allocated: int, reserved: int | None, used: int) -> dict[str, int | None]:
    return {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "device_used_bytes": used}


def _set_mmap_threshold(size: int) -> None:
    """Set the size from which the C library maps blocks separately, if the library has mallopt."""
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, size)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * size)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


SIZE, PRODUCTS, ROUNDS = {"cpu": 256}, 8, 4
ACCELERATOR_SIZE = 4096
"""Rows and columns of the speed test's matrix product. The test takes about 30 ms on a core or an accelerator."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def speed_test(job: Job, rank_device: RankDevice) -> float | None:
    """Return the seconds of `PRODUCTS` matrix products in the fastest of `ROUNDS` rounds, or None if they do not fit.

    All ranks start together, so devices that share power, cooling or cores do so in the test, too. Call it after the
    steps and after `memory()`, because it changes the peaks.
    """
    size = SIZE.get(job.device.type, ACCELERATOR_SIZE)
    dtype = torch.float32 if job.device.type == "cpu" else _DTYPES[job.train.precision]
    is_ready = False
    with suppress(RuntimeError):  # running out of memory here must not fail a finished trial
        factor = torch.ones(size, size, dtype=dtype, device=rank_device.device)
        product = torch.empty_like(factor)
        torch.mm(factor, factor, out=product)
        is_ready = True
    best_s = float("inf")
    for _ in range(ROUNDS):
        rank_device.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PRODUCTS if is_ready else 0):
            torch.mm(factor, factor, out=product)
        rank_device.synchronize()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s if is_ready else None


_CPU = torch.device("cpu")


def map_cuda_to_cpu() -> None:
    """Map the device "cuda" to the CPU in this process. Call it once per rank, before Megatron builds anything."""
    # Schedules, optimizers and gradient clipping create small tensors with device="cuda"; rotary embeddings under
    # context parallelism create one in pinned memory.
    torch.tensor = _on_cpu(torch.tensor)
    torch.zeros = _on_cpu(torch.zeros)
    # About seventy calls pass it as `device=`.
    torch.cuda.current_device = lambda: _CPU
    # Pipeline stages that exchange the shapes of their messages call this to wait for the device.
    torch.cuda.synchronize = lambda *args: None
    # Optimizers sort parameters by their type's name, such as torch.cuda.FloatTensor.
    torch.Tensor.type = _cuda_type_name
    # Rotary embeddings under context parallelism and tied embeddings move tensors to the device.
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor

    # Recompute saves and restores the random state of the device. Without a device, torch would queue a call that waits
    # for it for ever.
    tensor_parallel.random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    tensor_parallel.random._set_cuda_rng_state = lambda *args, **kwargs: None
    # The all-to-all dispatcher creates a stream to copy split sizes in the background; gradient buffers of newer
    # releases use the current stream.
    torch.cuda.Stream = torch.cuda.current_stream = _Stream
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy


class _Stream:
    """A replacement for a CUDA stream, without asynchronous work."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make_on_cpu


_plain_type = torch.Tensor.type


def _cuda_type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _plain_type(tensor, *args, **kwargs)
    return str(_plain_type(tensor)).replace("torch.", "torch.cuda.", 1)


def _splits_to_numpy(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Convert the split sizes of the token dispatcher to host arrays, at the `point` at which Megatron copies them.

    Megatron copies them on a side stream.
    """
    if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


MAX_ACTIVATION, MAX_GRADIENT = 1.0, 1e-4
"""Maximum absolute values in generated messages: losses and norms stay finite, and fp16 does not overflow."""


def init_fake_world(kind: str, rank: int, world_size: int) -> None:
    """Initialize this process as one of `world_size` ranks without the others. `kind` is torch's device type."""
    known = dist.Backend.backend_capability.get("fake", [])
    backend = "fake" if kind in known else f"cpu:fake,{kind}:fake"  # for devices that are registered by an import
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    # The other ranks send nothing. Each function below documents what is received instead.
    dist.all_to_all_single = _all_to_all
    for module in (mappings, layers, param_and_grad_buffer):  # these modules import the functions under other names
        module.dist_all_gather_func = _all_gather
        module.dist_reduce_scatter_func = _reduce_scatter
    # From 0.14 on these are methods of a class, in earlier releases functions of the module.
    owner = getattr(p2p_communication, "P2PCommunicator", p2p_communication)
    owner._communicate = _with_messages(owner._communicate)


def _all_gather(output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Receive copies of this rank's input in place of the other ranks' inputs.

    Weights that are gathered in place stay unchanged, because the buffer already contains the weights of the other
    ranks.
    """
    if output.untyped_storage().data_ptr() != input.untyped_storage().data_ptr():
        with torch.no_grad():
            output.view(dist.get_world_size(group), -1).copy_(input.reshape(1, -1))
    return _CompletedRequest() if async_op else None


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Write this rank's part of its own input to `output`, in place of the sum over all ranks."""
    with torch.no_grad():
        output.view(-1).copy_(input.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)])
    return _CompletedRequest() if async_op else None


def _all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Receive repeated copies of this rank's own rows. A rank that sends nothing receives random numbers."""
    row_count = input.size(0)
    with torch.no_grad():
        if not row_count:
            output.uniform_(-MAX_ACTIVATION, MAX_ACTIVATION)
        for start in range(0, output.size(0), row_count or output.size(0) or 1):
            received_rows = output[start : start + row_count]
            received_rows.copy_(input[: received_rows.size(0)])
    return _CompletedRequest() if async_op else None


class _CompletedRequest:
    """A replacement for the request of an asynchronous collective. It is already complete."""

    def wait(self, *_: Any) -> bool:
        return True


def _with_messages(communicate: Any) -> Any:
    """Wrap `communicate` so that received messages are small random numbers.

    Uninitialized memory may contain NaN, and then a router sends every token to the same experts.
    """

    @functools.wraps(communicate)
    def communicate_random(*args: Any, **kwargs: Any) -> Any:
        from_before, from_after, requests = communicate(*args, **kwargs)
        for tensor, largest in ((from_before, MAX_ACTIVATION), (from_after, MAX_GRADIENT)):
            if tensor is not None:
                with torch.no_grad():
                    tensor.uniform_(-largest, largest)
        return from_before, from_after, requests

    return communicate_random
