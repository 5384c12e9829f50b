"""Chips and devices: names, properties with their sources, and slow devices.

All ranks of a synchronous job have the same step time, because they wait for each other, so step times do not show
which device is slow. Each trial therefore ends with a speed test, a fixed matrix product on each rank. The clocks that
the vendor's tool reports are compared too.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from enum import Enum
from statistics import median
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Lt, MinLen

from flagcore.i18n import Message

Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]


class Support(Enum):
    """Whether a feature or an engine works on a chip. Trials may also run if the support is UNKNOWN."""

    YES = "yes"
    IMPOSSIBLE = "the hardware cannot"
    NOT_YET = "the plugin does not yet"
    UNKNOWN = "untested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a value comes from. `detail` states how the value was measured or where it was published."""

    kind: Literal["measured", "datasheet", "published", "estimated", "user"]
    detail: Annotated[str, MinLen(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A value in SI base units (bytes, seconds, flops), and where the value comes from."""

    value: Annotated[Positive, Lt(math.inf)]
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between neighbouring devices.

    `bytes_per_second`: the rate of one device in one direction, to all its peers together.
    `domain_size`: the number of consecutive devices that the link connects, such as a part of a node, or a rack. None
    means all devices of a node.
    `copy_engine`: whether collectives run on copy engines, so that they do not slow down kernels.
    `peer_access`: whether devices can access each other's memory. Otherwise copies go through the host.
    `switch_reduces`: whether the switch sums the data of its devices, so that an all-reduce sends data out of the
    domain only once.
    `whole_domains`: whether a job on `domain_size` devices of a node must take exactly those of one domain.
    """

    name: str
    topology: Literal["switch", "mesh", "pcie", "ring", "shared-memory"]
    bytes_per_second: Fact
    latency_seconds: float = 10e-6
    domain_size: int | None = None
    copy_engine: bool = False
    peer_access: bool = True
    switch_reduces: bool = False
    whole_domains: bool = False


USUAL_DEVICES = 8
"""The number of devices of a node if nothing else is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip model. All values describe one device, as software sees it.

    Values that were neither published nor measured are None or absent.

    `aliases`: the names that drivers and frameworks report.
    `family_names`: shorter names that mean this chip in specs and on the command line. Other chips may share them.
    `usable_bytes`: the memory that programs see, if the driver keeps some of it for itself.
    `architecture`: the target for which kernels are compiled, such as sm_90 or gfx942.
    `dense_flops_per_second`: the peak without sparsity by precision (`fp32 tf32 bf16 fp16 fp8 int8`).
    `host_bytes_per_second`: the rate of the host interface in one direction.
    `nic_latency_seconds`: the time of a small message to another host. None means the latency of InfiniBand.
    `tdp_watts`: the power that one device may draw continuously.
    `best_mfu`: the highest published model FLOPs utilization of a dense model, by precision, as its source counts it.
    """

    name: str
    vendor: str
    aliases: tuple[str, ...] = ()
    family_names: tuple[str, ...] = ()
    architecture: str = ""
    memory_bytes: Fact | None = None
    usable_bytes: Fact | None = None
    memory_bandwidth_bytes_per_second: Fact | None = None
    dense_flops_per_second: Mapping[str, Fact] = field(default_factory=dict)
    devices_per_node: Annotated[int, Ge(1)] = USUAL_DEVICES
    devices_per_card: Annotated[int, Ge(1)] = 1
    link: Link | None = None
    host_bytes_per_second: Fact | None = None
    nic_bytes_per_second: Fact | None = None
    nic_latency_seconds: float | None = None
    tdp_watts: Fact | None = None
    best_mfu: Mapping[str, Fact] = field(default_factory=dict)
    notes: str = ""

    @property
    def figures(self) -> dict[str, Fact]:
        """The known values by key. The key of a nested value is its path, such as `link.bytes_per_second`."""
        single = {
            "memory_bytes": self.memory_bytes,
            "usable_bytes": self.usable_bytes,
            "memory_bandwidth_bytes_per_second": self.memory_bandwidth_bytes_per_second,
            "link.bytes_per_second": self.link.bytes_per_second if self.link else None,
            "host_bytes_per_second": self.host_bytes_per_second,
            "nic_bytes_per_second": self.nic_bytes_per_second,
            "tdp_watts": self.tdp_watts,
        }
        peaks = {f"dense_flops_per_second.{name}": fact for name, fact in self.dense_flops_per_second.items()}
        return {**{key: fact for key, fact in single.items() if fact is not None}, **peaks}

    def has_name(self, name: str) -> bool:
        """Return whether `name` is the chip's name or an alias. Case, spaces and the vendor's name are ignored."""
        return normalize_name(name) in self.spellings

    def is_same(self, name: str, aliases: Iterable[str]) -> bool:
        """Return whether this is the measured chip with `name` and `aliases`.

        The names must be equal, and the aliases must be equal or share at least one.
        """
        measured, own = ({alias.casefold() for alias in each} for each in (aliases, self.aliases))
        return name.casefold() == self.name.casefold() and (measured == own or bool(measured & own))

    def matches_name(self, name: str) -> bool:
        """Return whether `name` means this chip in user input: its name, an alias, or a family name."""
        return normalize_name(name) in self.spellings | self._spellings_of(self.family_names)

    @property
    def spellings(self) -> frozenset[str]:
        """The chip's normalized name and aliases, each with and without the vendor's name."""
        return self._spellings_of((self.name, *self.aliases))

    def _spellings_of(self, names: Iterable[str]) -> frozenset[str]:
        vendor = normalize_name(self.vendor)
        normalized = {normalize_name(name).removeprefix(vendor) or vendor for name in names}
        return frozenset(normalized | {vendor + name for name in normalized})


TRAINED = ("bf16", "fp16", "fp32")
"""Precisions in which chips can train without additional libraries, in order of preference."""


MUCH_SLOWER = 2.0
"""If the job's precision is slower than fp32 by at least this factor, the user gets a message. If the steps of trials
then do not fit in the time limit, the search ends. Chosen by hand: no choice of knobs gains as much."""


def slowness(chip: Chip, precision: str) -> float:
    """Return how many times slower matrix products are in `precision` than in fp32, or 1.0 if a rate is unknown."""
    rate, fp32 = (chip.dense_flops_per_second.get(name) for name in (precision, "fp32"))
    return fp32.value / rate.value if rate and fp32 else 1.0


def usual_precision(chip: Chip, precisions: Iterable[str] = TRAINED) -> str | None:
    """Return the first of `precisions` that is at least as fast as fp32 on the chip, or None."""
    listed = (name for name in precisions if name in chip.dense_flops_per_second)
    return next((name for name in listed if slowness(chip, name) <= 1.0), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator of this machine, or of `host`.

    `memory_bytes`: the memory size that the driver reports.
    `name`: the name of the device in environment variables that select devices, such as a UUID. If it is empty, the
    name is `index`.
    `within`: the value of `EngineSupport.outer_variable`, if it is set. That variable selects a subset of the devices,
    and `name` is valid within this subset.
    """

    index: int
    chip: str
    memory_bytes: int | None = None
    driver: str = ""
    uuid: str = ""
    host: str = ""
    name: str = ""
    within: str = ""

    @property
    def selector(self) -> str:
        """The name of the device in environment variables that select devices."""
        return self.name or str(self.index)

    @property
    def title(self) -> str:
        """The name of the device in messages."""
        return f"device {self.index}" + (f" of {self.host}" if self.host else "")


def with_network(chip: Chip, nic_bytes_per_second: float | None, nic_latency_seconds: float | None = None) -> Chip:
    """Return `chip` with the network latency and the network rate that the user set. A rate of None changes nothing."""
    chip = replace(chip, nic_latency_seconds=nic_latency_seconds)
    if nic_bytes_per_second is None:
        return chip
    source = Source(kind="user", detail="cluster.nic_bytes_per_second")
    return replace(chip, nic_bytes_per_second=Fact(value=nic_bytes_per_second, source=source))


ASSUMED_NETWORK = Fact(
    value=25e9,
    source=Source(
        kind="estimated",
        detail="200 Gb/s per device, chosen: the known rates of chips with a link are 100 to 400 Gb/s; the key "
        "cluster.nic_bytes_per_second sets it",
    ),
)
"""The network rate of accelerators on several hosts, used if neither the plugin nor the spec states a rate."""

ASSUMED_NETWORK_RANGE = 2.0
"""The factor by which the network may be slower or faster than ASSUMED_NETWORK."""


LOOKALIKES = str.maketrans("o", "0")
MIN_SIMILARITY = 0.72
"""The minimum similarity (0 to 1) of normalized names at which a chip is suggested for a misspelled name."""


def similar_chips(word: str, chips: Iterable[Chip]) -> tuple[str, ...]:
    """Return the names of up to four chips that `word` may mean, most similar first.

    Chips with similar names are returned only if no chip has a name or alias that contains `word` or is part of `word`.
    The vendor's name is ignored, and so is the difference between O and 0.
    """
    containing, similar = [], []
    for chip in chips:
        vendor = normalize_name(chip.vendor)
        every = (word, chip.name, *chip.aliases, chip.name.split("-")[0])
        searched, *names, family = (normalize_name(each).removeprefix(vendor).translate(LOOKALIKES) for each in every)
        similarity = max(SequenceMatcher(None, searched, name).ratio() for name in (*names, family))
        parts = [name for name in names if name and not searched.partition(name)[2][:1].isdigit()]  # a whole number
        if len(searched) > 1 and any(searched in name or name in searched for name in parts):
            containing.append((-SequenceMatcher(None, searched, names[0]).ratio(), chip.name))
        elif similarity >= MIN_SIMILARITY if len(searched) > 3 else searched[:1] == family[:1] and similarity >= 0.66:
            similar.append((-similarity, chip.name))
    return tuple(name for _, name in sorted(containing or similar)[:4])


MAX_LISTED = 20
"""The maximum number of chips that one message lists."""


def unknown_chip_hint(word: str, chips: Iterable[Chip]) -> str:
    """Return a hint for an unknown chip name: the chips of a vendor, similar names, or all chips if there are at most
    MAX_LISTED."""
    known_chips = tuple(chips)
    if of_vendor := [chip.name for chip in known_chips if normalize_name(chip.vendor) == normalize_name(word)]:
        return f"{word} is a vendor; name one of its chips: {', '.join(sorted(of_vendor))}"
    similar = " or ".join(similar_chips(word, known_chips))
    listed = ", ".join(sorted(chip.name for chip in known_chips)) or "none"
    if not similar and len(known_chips) > MAX_LISTED:
        return f"`flag plugins chips` lists all {len(known_chips)} chips and their aliases"
    hint = f"did you mean {similar}?" if similar else f"known chips: {listed};"
    return f"{hint} `flag plugins chips` lists all chips and their aliases"


def normalize_name(name: str) -> str:
    """Return the letters, digits and plus signs of a chip name in lower case, for comparisons."""
    return re.sub(r"[^\w+]|_", "", name.casefold())[:64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The processes that use a device, and whether new processes can start on it.

    `processes`: descriptions of the processes with memory on the device, such as `4711 python (20.5 GiB)`.
    `blocked`: the reason why no process can start on the device, such as its compute mode. Empty if none is known.
    `free_bytes`: the memory that new processes can use, if the devices share the memory of the machine. None if it is
    unknown.
    `pending`: a setting that changes with the next reset of the device.
    """

    processes: tuple[str, ...] = ()
    blocked: str = ""
    free_bytes: int | None = None
    pending: str = ""


SLOW_RATIO = 1.25
"""A device is slow if its speed test takes at least this many times as long as the median of the other devices.
Identical chips differ by a few percent."""

SLOW_CORE_RATIO = 2.0
"""SLOW_RATIO for CPU cores. It is larger because other processes slow them down."""

LOW_CLOCK_RATIO = 0.85
"""A device is throttled if its clock is at most this share of the median of the other devices."""

SPEED_TEST, CLOCK, MEMORY_IN_USE = "speed_test_s", "clock_hertz", "memory_used_bytes"
"""Names of a device's metrics in `Measurement.devices` and in telemetry."""


CORES, OTHERS_CORES = "cores", "cores_used_by_others"
"""Metrics in a host's telemetry: the number of cores, and the number of cores that other programs use."""
DISK_WAIT, SWAPPED = "disk_wait", "swapped_bytes_per_second"
"""Metrics in a host's telemetry: the share of core time spent waiting for a disk, and the rate of swapping."""
BUSY_SHARE, WAIT_SHARE, SWAP_BYTES = 0.1, 0.1, 1e6
"""A disturbance is reported above these values: share of cores that other programs use, share of core time spent
waiting for a disk, and bytes swapped per second. Chosen by hand."""


def share_of_others(telemetry: Mapping[str, float]) -> float:
    """Return the share of a host's cores that other programs used, or 0 if it is unknown or at most BUSY_SHARE."""
    share = telemetry.get(OTHERS_CORES, 0.0) / max(telemetry.get(CORES, 0.0), 1.0)
    return share if share > BUSY_SHARE else 0.0


def disturbances(telemetry: Mapping[str, float]) -> Iterator[Message]:
    """Yield a message for each disturbance of a host: other programs, a slow disk, swapping.

    `telemetry`: the mean of each metric of the host, by name.
    """
    others_cores, cores = telemetry.get(OTHERS_CORES, 0.0), telemetry.get(CORES, 0.0)
    if others_cores > BUSY_SHARE * cores > 0.0:
        yield Message("other programs used {others:.1f} of {cores:.0f} cores", others=others_cores, cores=cores)
    if (share := telemetry.get(DISK_WAIT, 0.0)) > WAIT_SHARE:
        yield Message("the cores waited for a disk {share:.0%} of the time", share=share)
    if (rate := telemetry.get(SWAPPED, 0.0)) > SWAP_BYTES:
        yield Message("{rate:.0f} MB/s of memory were swapped", rate=rate / 1e6)


def slow_devices(
    devices: Sequence[Mapping[str, float]],
    devices_per_node: int,
    slow_ratio: float = SLOW_RATIO,
    hosts: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a line for each slow or throttled device.

    `devices`: the metrics of each device by name. The metric `device` is the device's number, counted over all nodes.
    `slow_ratio`: a device is slow if its speed test takes at least this many times as long as the median.
    `hosts`: the names of the nodes. Empty if they are unknown.
    """
    slow_text = "takes {ratio:.3g}x the median time of the other devices in the speed test"
    clock_text = "runs at {ratio:.2g}x the median clock of the other devices ({gigahertz:.3g} GHz)"
    lines = []
    for name, text in ((SPEED_TEST, slow_text), (CLOCK, clock_text)):
        figures = [(int(each["device"]), float(each[name])) for each in devices if each.get(name, 0.0) > 0.0]
        for index, (number, figure) in enumerate(figures if len(figures) > 1 else ()):
            ratio = figure / median(other for _, other in figures[:index] + figures[index + 1 :])
            if ratio >= slow_ratio if name == SPEED_TEST else ratio <= LOW_CLOCK_RATIO:
                node = number // devices_per_node
                host = hosts[node] if node < len(hosts) else f"node {node}"
                problem = text.format(ratio=ratio, gigahertz=figure / 1e9)
                lines.append(f"device {number % devices_per_node} of {host} {problem}")
    return tuple(lines)
