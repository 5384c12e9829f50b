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
    """One record. `candidate` has the given knobs; others have the engine's default.

    `chip` is a name or an alias, `nic_bytes_per_second` the network if the record gives it, `rank` the global rank to
    predict. `notes` are the source's own words on the engine's settings.
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
