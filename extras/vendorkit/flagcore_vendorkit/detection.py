"""Finds a vendor's devices and reads their state, with the management tool or, if it is missing, with torch."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from flagcore.domain.chip import Device, DeviceUse
from flagcore.domain.cluster import NodeGroup
from flagcore_vendorkit import machine
from flagcore_vendorkit.machine import TorchReport, query_tool, setting, tool_output, visible
from flagcore_vendorkit.rows import Listing, Row, blocked_reason, read_processes, with_own_adapters

LOG = logging.getLogger(__name__)
READING_SECONDS = 3.0
"""Time limit in seconds for a call of the management tool during a trial."""
DOCTOR_SECONDS = 60.0
"""Time limit in seconds for the first import of torch in `flag doctor`."""

T = TypeVar("T")

ListDevices = Callable[[float], Listing]
"""Runs the management tool with a time limit in seconds, and returns the devices that the tool prints."""


def list_with(
    read: Callable[[str], Listing],
    *tools: str,
    processes: Callable[[str], Mapping[int, tuple[str, ...]]] = read_processes,
) -> ListDevices:
    """Return a function that runs `tools` such as `acme-smi info`, one by one until `read` finds devices in the output.

    `processes` reads the processes that hold memory of each device, from the same output.
    """

    def read_with_uses(text: str) -> Listing:
        listing, held = read(text), processes(text)
        rows = ((row, held.get(row.device.index, ())) for row in listing.rows)
        uses = ((row, DeviceUse(processes=used, blocked=blocked_reason(row.mode, used))) for row, used in rows)
        return replace(listing, rows=tuple(replace(row, use=use) for row, use in uses))

    def run(timeout_seconds: float) -> Listing:
        left_out, start = tuple[str, ...](), time.monotonic()
        for tool in tools:
            seconds = max(start + timeout_seconds - time.monotonic(), 1.0)  # in all, but a second for each
            found = query_tool(read_with_uses, *tool.split(), timeout_seconds=seconds) or Listing()
            if found.rows:
                return found
            left_out += found.left_out
        return Listing(left_out=left_out)

    return run


@dataclass(frozen=True, kw_only=True)
class DeviceDetector:
    """How to find a vendor's devices. torch runs in another process, and only if `device_file` exists.

    `tool`: the name of the management tool in messages.
    `visible`: the environment variables that restrict the devices of a process, the vendor's own variable first. They
    have the same meaning, and the first one that is set applies.
    `empty_is_unset`: whether an empty variable counts as unset.
    `outer`: a variable that a lower software layer applies first. The indices in `visible` then count only the devices
    that it leaves visible.
    `device_file`: a glob pattern below the root, such as `dev/acme*`.
    `torch_device`: torch's name of the devices.
    `trusts`: returns whether the devices in torch's report are this vendor's, because the torch builds of several
    vendors report devices of type cuda.
    `uuids`: returns UUIDs by index, if the tool's listing does not contain them.
    `topology`: the command that prints the links between devices and network adapters.
    """

    vendor: str
    tool: str
    listing: ListDevices
    reading: ListDevices | None = None
    """Like `listing`, with the telemetry of each device. None means that `listing` contains it."""
    visible: tuple[str, ...]
    outer: str = ""
    empty_is_unset: bool = False
    vendor_variables: tuple[str, ...] = ("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND")
    """Variables that select a vendor. The first one that is set applies. The default is that of FlagGems."""
    own_variables: tuple[str, ...] = ()
    """Prefixes of variables that only this vendor's software reads."""
    device_file: str
    pci_vendor: int
    pci_classes: tuple[str, ...] = machine.ACCELERATORS
    torch_device: str
    torch_attributes: tuple[str, ...] = ()
    trusts: Callable[[TorchReport], bool]
    uuids: Callable[[], Mapping[int, str]] | None = None
    topology: tuple[str, ...] = ()
    uses: Callable[[float], Mapping[int, DeviceUse]] | None = None
    """Returns the users of each device by index, with a time limit in seconds. None: the listing contains them."""

    def devices(self, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> tuple[Device, ...]:
        """Return the devices that processes started from here can use, or none if this shell selects another vendor.

        `environment`: the environment variables of these processes. None means those of this shell.
        `root`: the folder below which device files and the PCI bus are searched.
        """
        environment = os.environ if environment is None else environment
        if self.vendor_of(os.environ) not in (self.vendor, None):
            return ()
        listing = self.listing(10.0)
        for line in listing.left_out:
            LOG.warning("%s", line)
        if listing.rows:
            return self._selected(tuple(row.device for row in listing.rows), environment)
        if any(root.glob(self.device_file)):  # without a device file, no process here can use a device
            selected = {name: environment[name] for name in (self.outer, *self.visible) if name in environment}
            about = (self.torch_device, self.torch_attributes)
            report = machine.query_torch(*about, environment={**os.environ, **selected})
            if report is None:
                message = "there is a device file, but %s is missing and torch lists no %s devices"
                LOG.warning(message, self.tool, self.torch_device)
            return self._with_names(self.torch_devices(report), environment)
        if any(machine.pci_devices(self.pci_vendor, root, self.pci_classes)):
            LOG.warning(
                "%s devices are on the PCI bus, but there is neither %s nor /%s: the driver is not installed here",
                *(self.vendor, self.tool, self.device_file),
            )
        return ()

    def vendor_of(self, environment: Mapping[str, str]) -> str | None:
        """Return the vendor that the variables in a job's `environment` select.

        If they select none, but a variable of this vendor's software is set, return this vendor. Otherwise return None.
        """
        selected = next((environment[name].casefold() for name in self.vendor_variables if environment.get(name)), None)
        return selected or (self.vendor if any(name.startswith(self.own_variables) for name in environment) else None)

    def rows(self) -> tuple[Row, ...]:
        """Return the devices with their telemetry during a trial, as the management tool prints them."""
        return (self.reading or self.listing)(READING_SECONDS).rows

    def matrix(self) -> str:
        """Return the tool's matrix of links between devices and adapters, or an empty string if there is no tool."""
        return (tool_output(*self.topology) or "") if self.topology else ""

    def uses_now(self) -> Mapping[int, DeviceUse]:
        """Return the users of each device by index."""
        return self.uses(READING_SECONDS) if self.uses else {row.device.index: row.use for row in self.rows()}

    def torch_devices(self, report: TorchReport | None) -> tuple[Device, ...]:
        """Return the devices in torch's report if they are this vendor's. torch has already applied `visible`."""
        return report.devices if report is not None and self.trusts(report) else ()

    def problems(self, root: Path = Path("/")) -> tuple[str, ...]:
        """Return the reason why the installed torch cannot use the devices, and sentences about slow links."""
        slow = machine.narrow_links(self.pci_vendor, root, self.pci_classes)
        if find_spec("torch") is None:
            return slow
        report = machine.query_torch(self.torch_device, self.torch_attributes, DOCTOR_SECONDS)
        if self.torch_devices(report):
            return slow
        torch = f"torch {report.version}" if report else "torch"
        return (f"{torch} lists no {self.torch_device} devices of {self.vendor}: install the vendor's build", *slow)

    def with_own_adapters(self, group: NodeGroup, root: Path = Path("/")) -> NodeGroup | None:
        """Return `group` with this machine's network adapters, or None if the machine is not a node of the group."""
        if group.nodes == 1 or not self.topology:
            return None
        if not any(group.chip.has_name(row.device.chip) for row in self.listing(10.0).rows):
            return None
        return with_own_adapters(group, self.matrix(), root)

    def _selected(self, devices: tuple[Device, ...], environment: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the variables of `environment` select."""
        outer, inner = setting((self.outer,), environment), setting(self._effective(environment), environment)
        if self.uuids is not None and any(re.search("[A-Za-z]", word) for word in (*(outer or ()), *(inner or ()))):
            uuids = self.uuids()
            devices = tuple(replace(device, uuid=uuids.get(device.index, "")) for device in devices)
        if outer is not None:
            within = environment[self.outer]
            restricted = visible(devices, self.outer, environment=environment)
            devices = tuple(replace(each, name=str(place), within=within) for place, each in enumerate(restricted))
        selected = visible(devices, *self._effective(environment), environment=environment)
        if unknown := [word for word in (inner or ())[len(selected) :] if re.search("[A-Za-z]", word)]:
            message = "%r in %s is no device that %s lists: use indices or UUIDs"
            LOG.warning(message, unknown[0], " or ".join(self.visible), self.tool)
        return selected

    def _with_names(self, devices: tuple[Device, ...], environment: Mapping[str, str]) -> tuple[Device, ...]:
        """Return torch's devices with their names in `environment`, which already restricts them."""
        within = environment.get(self.outer, "")
        words = [*(setting(self._effective(environment), environment) or ()), *[""] * len(devices)]
        return tuple(replace(each, name=word, within=within) for each, word in zip(devices, words, strict=False))

    def _effective(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables of `visible`, without those that are empty in `environment` if these count as unset."""
        return tuple(name for name in self.visible if environment.get(name) or not self.empty_is_unset)


FRESH_SECONDS = 0.9


class CachedAnswers(Generic[T]):
    """A cache of the management tool's answers, by device index. After FRESH_SECONDS, they are read again."""

    def __init__(self, read: Callable[[], Mapping[int, T]]) -> None:
        self._read = read
        self._answers: Mapping[int, T] = {}
        self._until = float("-inf")
        self._lock = threading.Lock()

    def get(self, index: int) -> T | None:
        """Return the answer about the device with this index, or None if there is none."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._answers = self._read()
                self._until = time.monotonic() + FRESH_SECONDS
            return self._answers.get(index)


class Readings:
    """The tool's answers about all devices, shared by the readers of single devices."""

    def __init__(self, detector: DeviceDetector) -> None:
        self.rows = CachedAnswers(lambda: {row.device.index: row for row in detector.rows()})
        self.uses = CachedAnswers(detector.uses_now)


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The `flagcore.contracts.Telemetry` of one device."""

    readings: Readings
    index: int

    def sample(self) -> Mapping[str, float]:
        """Return the device's current telemetry. Raises LookupError if the tool does not list the device."""
        row = self.readings.rows.get(self.index)
        if row is None:
            raise LookupError(f"device {self.index} is not in the management tool's table")
        return row.reading

    def use(self) -> DeviceUse:
        """Return the users of the device, if the tool reports them."""
        return self.readings.uses.get(self.index) or DeviceUse()
