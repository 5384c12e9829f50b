"""Finds the accelerators of this machine, with or without their management tool, without loading a driver here."""

import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

from flagcore.domain.chip import Device
from flagcore.domain.host import text_of
from flagcore_vendorkit.rows import Listing, strip_controls

_TIME = re.compile(r"(?<![\w:])\d\d:\d\d:\d\d(?!\.\d\b)(?![\w:])")
"""Matches a time of day, but not a PCI address (`0:07:00`, `00:07:00.0`)."""
MAX_BYTES = 2 * 2**20
"""Maximum size of a tool's output in bytes, so that it cannot fill the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a command, with undecodable bytes replaced, and its exit status.

    The status is None if the command exceeded the time limit.
    """

    text: str
    errors: str
    status: int | None


def run_tool(*argv: str, timeout_seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> Output | None:
    """Run a command without a shell. Returns None if it is missing or cannot be started.

    `environment` replaces this shell's environment. A command that exceeds the time limit is killed with its children.
    The function does not wait until they end, because a process that is stuck in a driver cannot be killed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True, env=environment
            )
        except OSError:
            return None
        status = None
        with suppress(OSError):  # the process may already have ended
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
        try:
            status = process.wait(timeout_seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        return Output(text=_decoded(output), errors=_decoded(errors), status=status)


def tool_output(*argv: str, timeout_seconds: float = 10.0, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the output of a command, or None if it is missing, fails or exceeds the time limit."""
    output = run_tool(*argv, timeout_seconds=timeout_seconds, environment=environment)
    return output.text if output is not None and output.status == 0 else None


def query_tool(read: Callable[[str], Listing], *argv: str, timeout_seconds: float = 10.0) -> Listing | None:
    """Return the devices that a management tool prints, as parsed by `read`. Returns None if the tool is missing.

    `left_out` describes lines that cannot be read, with the name of the tool. Devices that were listed before the tool
    failed are valid, because some tools fail to warn about one device.
    """
    output = run_tool(*argv, timeout_seconds=timeout_seconds)
    if output is None:
        return None
    tool = argv[0]
    if output.status is None:
        return Listing(left_out=(f"{tool} did not answer within {timeout_seconds:g} s and was killed",))
    listing = read(strip_controls(output.text))
    first = _first_line(output.text) or _first_line(output.errors) or "nothing"
    if not listing.rows and output.status:
        return Listing(left_out=(f"{tool} failed with exit status {output.status}: {first}",))
    if not listing.rows and not listing.left_out:
        return Listing(left_out=(f"{tool} lists no device in a known format; it prints: {first}",))
    return Listing(listing.rows, tuple(f"{tool}: {line}" for line in listing.left_out))


def visible(
    devices: tuple[Device, ...], *variables: str, environment: Mapping[str, str] | None = None
) -> tuple[Device, ...]:
    """Return the devices that processes with `environment` (None: this shell's) can use, with their names there.

    `variables` are environment variables such as `X_VISIBLE_DEVICES`. Their values are names of devices (by default
    their indices) or prefixes of UUIDs, separated by commas. The first variable that is set is used. As in the drivers,
    an unknown name hides all following devices.
    """
    words = setting(variables, os.environ if environment is None else environment)
    if words is None:
        return devices
    chosen: dict[int, Device] = {}
    for word in words:
        match = next((d for d in devices if d.selector == word or (len(word) > 4 and d.uuid.startswith(word))), None)
        if match is None:
            break
        chosen.setdefault(match.index, replace(match, name=word))
    return tuple(chosen.values())


def setting(variables: Iterable[str], environment: Mapping[str, str]) -> list[str] | None:
    """Return the comma-separated words of the first of `variables` that is set. Returns None if none is set."""
    value = next((environment[name] for name in variables if name in environment), None)
    return None if value is None else [word.strip() for word in value.split(",")]


def _decoded(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _first_line(text: str) -> str:
    """Return the first line that contains words and is not a time stamp, limited to 120 characters."""
    lines = (" ".join(line.split()) for line in strip_controls(text).splitlines())
    return next((line[:120] for line in lines if re.search(r"\w", line) and not _TIME.search(line)), "")


ACCELERATORS = ("0x03", "0x12")
"""PCI classes of display controllers and of processing accelerators."""

TORCH_SECONDS = 10.0

_QUERY_TORCH = """
import importlib.util, json, sys
import torch
kind, *asked = sys.argv[1:]
accelerator = getattr(torch, "accelerator", None)
if kind != "any":
    if kind != "cuda" and importlib.util.find_spec("torch_" + kind):
        __import__("torch_" + kind)
elif accelerator is not None and accelerator.is_available():
    kind = accelerator.current_accelerator().type
else:
    kind = "cuda"
module = getattr(torch, kind)
found = [module.get_device_properties(i) for i in range(module.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "kind": kind,
    "backend": torch.distributed.get_default_backend_for_device(kind) if sys.argv[1] == "any" else "",
    "attributes": [name for name in asked if hasattr(torch, name)],
    "devices": [[each.name, each.total_memory] for each in found],
}))
"""


class TorchReport(NamedTuple):
    """The version of torch, the requested attributes that it has, and its devices with their memory in bytes.

    `kind`: torch's name of the devices.
    `backend`: the name of the backend for collectives. Empty unless the requested kind was `any`.
    """

    version: str
    attributes: frozenset[str]
    devices: tuple[Device, ...]
    kind: str = ""
    backend: str = ""


def narrow_links(vendor_id: int, root: Path = Path("/"), kinds: tuple[str, ...] = ACCELERATORS) -> tuple[str, ...]:
    """Return a sentence about each of a vendor's PCI devices whose link has fewer lanes than the device supports."""
    folders = list(pci_devices(vendor_id, root, kinds))
    widths = [[text_of(folder / f"{name}_link_width") for name in ("current", "max")] for folder in folders]
    return tuple(
        f"the PCIe link of {folder.name} has {lanes} of {most} lanes: check its slot and its cables"
        for folder, (lanes, most) in zip(folders, widths, strict=True)
        if lanes.isdigit() and most.isdigit() and 0 < int(lanes) < int(most)
    )


def pci_devices(vendor_id: int, root: Path = Path("/"), kinds: tuple[str, ...] = ACCELERATORS) -> Iterator[Path]:
    """Yield the kernel's folder of each of a vendor's accelerators, sorted by their PCI addresses."""
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if text_of(folder / "vendor") == f"{vendor_id:#06x}" and text_of(folder / "class").startswith(kinds):
            yield folder


def query_torch(
    kind: str,
    attributes: Sequence[str] = (),
    timeout_seconds: float = TORCH_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> TorchReport | None:
    """Return the report of the installed torch about its devices of `kind`, and about `attributes`.

    `kind` is torch's name of the devices, or `any` for its accelerator. torch runs in a separate process with
    `environment` (None: this shell's), where it may crash or hang. Returns None if torch or this backend is missing, or
    if the process fails.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    query = (sys.executable, "-c", _QUERY_TORCH, kind, *attributes)
    return read_torch(tool_output(*query, timeout_seconds=timeout_seconds, environment=environment) or "")


def read_torch(printed: str) -> TorchReport | None:
    """Return the report that torch's process printed, or None. A vendor's library may print a banner before it."""
    for line in reversed(printed.splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            report = json.loads(line[line.index("{") :])
            devices = tuple(
                Device(index=index, chip=str(name), memory_bytes=int(total))
                for index, (name, total) in enumerate(report["devices"])
            )
            words = {name: str(report[name]) for name in ("version", "kind", "backend")}
            return TorchReport(**words, attributes=frozenset(report["attributes"]), devices=devices)
    return None
