"""What is known of a chip, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from enum import Enum


class Support(Enum):
    """Whether something works. Unknown is not no: it is reported, and may be measured."""

    YES = "yes"
    IMPOSSIBLE = "the hardware cannot"
    NOT_YET = "the plugin does not yet"
    UNKNOWN = "nobody has said"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure is from. `kind` is measured, datasheet, published or estimated; `detail` says how or where."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A figure in SI base units (bytes, seconds, flops) and its source."""

    value: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How neighbouring devices are joined.

    `bytes_per_second` is what one device can send in one direction to all its peers together.
    `topology` is one word: switch, mesh, pcie, ring or shared-memory. `domain_size` is the number of
    consecutive devices that the link joins: an island of a node, or a rack (None: all devices of a node).
    `copy_engine` says that collectives run on engines beside the compute units and take nothing from kernels.
    `peer_access` False means that devices cannot reach each other's memory: copies go through the host.
    `switch_reduces` says that the switch adds up what devices send, so an all-reduce leaves the domain only once.
    """

    name: str
    topology: str
    bytes_per_second: Fact
    latency_seconds: float = 10e-6
    domain_size: int | None = None
    copy_engine: bool = False
    peer_access: bool = True
    switch_reduces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One model of accelerator, as software sees one device of it.

    `aliases` are the strings under which drivers and frameworks report it. `dense_flops_per_second` maps a
    precision (`fp32 tf32 bf16 fp16 fp8 int8`) to the peak without sparsity. `host_bytes_per_second` is what the
    interface to the host carries in one direction. A figure that nobody published or measured is absent, never guessed.
    """

    name: str
    vendor: str
    aliases: tuple[str, ...] = ()
    memory_bytes: Fact | None = None
    memory_bandwidth_bytes_per_second: Fact | None = None
    dense_flops_per_second: Mapping[str, Fact] = field(default_factory=dict)
    devices_per_node: int = 8
    devices_per_card: int = 1
    link: Link | None = None
    host_bytes_per_second: Fact | None = None
    nic_bytes_per_second: Fact | None = None
    notes: str = ""

    def answers_to(self, name: str) -> bool:
        """Return whether `name` is this chip's name or one of its aliases; see `spellings` for what does not matter."""
        return bare(name) in self.spellings

    @property
    def spellings(self) -> frozenset[str]:
        """The chip's name and aliases as letters and digits, each with the vendor's name before it and without.

        Letter case, spaces and dashes differ between tools, and some leave out the vendor; nothing else is forgiven.
        """
        vendor = bare(self.vendor)
        names = {bare(name).removeprefix(vendor) or vendor for name in (self.name, *self.aliases)}
        return frozenset(names | {vendor + name for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator that was found on this machine. `memory_bytes` is what the driver reports for it."""

    index: int
    chip: str
    memory_bytes: int | None = None
    driver: str = ""
    uuid: str = ""


def with_network(chip: Chip, nic_bytes_per_second: float | None) -> Chip:
    """Return `chip` with a network of the user's own; None leaves it as it is."""
    if nic_bytes_per_second is None:
        return chip
    return replace(chip, nic_bytes_per_second=Fact(value=nic_bytes_per_second, source=Source(kind="user", detail="")))


NEAR = 0.72
"""A chip's name is near a word if so much of both is the same, letter case, spaces and dashes aside."""


def nearest(word: str, chips: Iterable[Chip], most: int = 4) -> tuple[str, ...]:
    """Return the names of the chips that `word` may have meant, the likeliest first.

    These are the ones with a name or alias of which `word` is a part, or which is a part of it; where there is none,
    those that are spelt alike. The vendor's name, which most drivers put first, says nothing of the chip.
    """
    parts, alike = [], []
    for chip in chips:
        vendor = bare(chip.vendor)
        wanted, *names = (bare(name).removeprefix(vendor) for name in (word, chip.name, *chip.aliases))
        family = bare(chip.name.split("-")[0])
        nearness = max(SequenceMatcher(None, wanted, name).ratio() for name in (*names, family))
        if len(wanted) > 1 and any(wanted in name or name in wanted for name in names if name):
            parts.append((-SequenceMatcher(None, wanted, names[0]).ratio(), chip.name))
        elif nearness >= NEAR:
            alike.append((-nearness, chip.name))
    return tuple(name for _, name in sorted(parts or alike)[:most])


MOST_LISTED = 20
"""As many chips are named in one message."""


def unknown_chip(word: str, chips: Iterable[Chip]) -> str:
    """Return how to go on where no chip answers to `word`: the names near it, else all if they are few, and where to
    find aliases."""
    known = tuple(chips)
    near, listed = " or ".join(nearest(word, known)), ", ".join(sorted(chip.name for chip in known)) or "none"
    if not near and len(known) > MOST_LISTED:
        return f"`flag plugins chips` lists all {len(known)} chips, with aliases"
    hint = f"did you mean {near}?" if near else f"known chips: {listed};"
    return f"{hint} `flag plugins chips` lists all, with aliases"


def bare(name: str) -> str:
    """Return the letters, digits and plus signs of a name in small letters, by which chips' names are compared."""
    return "".join(letter for letter in name.casefold() if letter.isalnum() or letter == "+")[:64]
