"""The rates of torch's kernels on this machine: measured once, in another process, and stored for later commands."""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flagcore_vendorkit.fields import build
from flagcore_vendorkit.machine import tool_output

from flagcore.domain import host
from flagcore.domain.files import data_folder, read_regular, replace
from flagcore.errors import SpecError

PROGRAM = "flagcore_cpu.measure"
SECONDS = 1.6
"""Seconds of the measurement on a quiet machine, without importing torch and loading its kernels."""
TIMEOUT_SECONDS = 90.0
"""Time limit of the program in seconds. Its import of torch may read half a gigabyte."""

MAX_RUNNING = 4
"""Maximum number of runnable threads per core for a full measurement. Chosen."""
CROWDED_SECONDS = 0.3
"""`SECONDS` on a machine with more threads, where each takes several. These rates are not stored: those of products
differ by up to 15%, but the time to start a reduction by a factor of 6."""

MAPPED_BYTES = 32 * 2**20
"""32 MiB: the size from which glibc returns the memory of a tensor to the system, so that the next one has new pages:
DEFAULT_MMAP_THRESHOLD_MAX of its malloc."""

NEW_SHARE = 4 / 46
"""Bytes of the new tensor per byte that the element-wise kernels of `measure` move."""

CHOOSING_VARIABLES = (
    "PYTHONPATH",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables on which torch's kernels depend. They select its modules, or the instructions that it uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates that one core reaches while all cores are busy, in SI units.

    `flops` are the rates of the matrix products of linear layers by precision: the mean of forward pass, input gradient
    and weight gradient. `attention_s` are the seconds of `measure.ATTENTION` forward and backward by precision.
    `elementwise` are bytes and seconds of a mix of kernels. `reduction` are bytes and seconds of all-reduces between
    two processes; it is empty for one core. `launch_s` is the time of a tiny kernel. `date` is ISO 8601.
    """

    torch: str
    date: str
    flops: Mapping[str, float]
    attention_s: Mapping[str, tuple[float, float]]
    elementwise: tuple[tuple[float, float], ...]
    bytes_per_second: float
    launch_s: float
    reduction: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        figures = [*self.flops.values(), self.bytes_per_second, self.launch_s]
        figures += [each for row in (*self.elementwise, *self.reduction, *self.attention_s.values()) for each in row]
        if not {"fp32", "bf16"} <= self.flops.keys() & self.attention_s.keys() or len(self.elementwise) < 2:
            raise ValueError("rates are missing")
        if not all(0 < each < float("inf") for each in figures):
            raise ValueError("rates must be above 0")

    @property
    def new_page_seconds(self) -> float:
        """The seconds per byte of a tensor with new pages: the additional time of the largest element-wise kernels."""
        *_, (smaller, smaller_s), (larger, larger_s) = self.elementwise
        tensor_bytes = larger * NEW_SHARE
        return max(larger_s - smaller_s * larger / smaller, 0.0) / tensor_bytes if tensor_bytes > MAPPED_BYTES else 0.0

    @property
    def how(self) -> str:
        """A text that states how the rates were measured."""
        return f"torch {self.torch} on this machine with all cores busy, {self.date[:10]}"


_found: dict[Path, Rates | None] = {}
"""Cache of this process: the rates by file, or None after a failed measurement."""


def rates_here(processor: str, *, measure: bool) -> Rates | None:
    """Return the rates of this machine, measured or stored. Returns None without torch, or if the measurement fails.

    `processor` identifies the processor and its instructions. Without `measure`, rates are returned only if they are
    stored or this process has measured them.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return None
    cores = host.cores()
    text = "\n".join([processor, sys.prefix, *(os.environ.get(name, "") for name in CHOOSING_VARIABLES)])
    words = ("cpu", platform.node(), f"{cores} cores", f"torch {torch}", hashlib.sha256(text.encode()).hexdigest()[:12])
    name = "--".join(re.sub(r"[^\w.+]+", "-", word) for word in words)
    file = data_folder() / "calibrations" / "rates" / f"{name}.json"
    if file not in _found:
        with suppress(OSError, ValueError, TypeError, SpecError):  # if the file is unreadable, measure again
            _found[file] = read(read_regular(file))
    if file not in _found and measure:
        _found[file] = _measured(file, cores)
    return _found.get(file)


def _is_crowded() -> bool:
    """Return whether so many threads want to run on this host that a full measurement would take minutes."""
    with suppress(OSError, ValueError, IndexError):
        running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
        return int(running) > MAX_RUNNING * (os.cpu_count() or 1)
    return False


def read(text: str | bytes) -> Rates:
    """Return rates from their JSON. Raises ValueError, TypeError or SpecError."""
    found: Rates = build(Rates, json.loads(text), "rates")
    return found


WITHOUT_BACKENDS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Without it, torch imports what is installed for other devices, which may be broken."""


def _measured(file: Path, cores: int) -> Rates | None:
    seconds = CROWDED_SECONDS if (is_crowded := _is_crowded()) else SECONDS
    words, environment = (sys.executable, "-m", PROGRAM, str(cores), str(seconds)), {**os.environ, **WITHOUT_BACKENDS}
    printed = tool_output(*words, timeout_seconds=TIMEOUT_SECONDS, environment=environment)
    try:
        found: dict[str, Any] = json.loads((printed or "").strip().rpartition("\n")[2])
        rates = read(json.dumps({**found, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}))
    except (ValueError, TypeError, SpecError):
        return None
    if is_crowded:
        return rates
    with suppress(OSError):  # if the folder is read-only, the next command measures again
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, json.dumps(asdict(rates), indent=1) + "\n")
    return rates
