"""A job record: one candidate on one cluster, to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flagcore.domain.candidate import KnobValue
from flagcore.domain.model import Model
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One record. `candidate` has the knobs that were given; an absent one has its engine's default.

    `chip` is a name or an alias of a chip, `nic_bytes_per_second` its network where the record says it, `rank` the
    global rank whose own figures are wanted.
    `work` is what was done. `notes` is what its source says of the engine's settings in its own words.
    """

    id: str
    kind: str
    model: Model
    chip: str
    devices: int
    devices_per_node: int
    work: TrainSpec | ServeSpec
    candidate: Mapping[str, KnobValue]
    nic_bytes_per_second: float | None = None
    rank: int | None = None
    notes: str = ""
