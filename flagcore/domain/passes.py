"""The passes of a pipeline, from which the timeline of a training step is drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch on each pipeline stage of a candidate, all virtual stages together.

    `backward_s` includes recomputation and both gradients; `weight_s` is its part for the gradients of weights, which
    some schedules run separately (empty: unknown). `paired_s` is a forward and a backward of two micro-batches that
    overlap (empty: none do). `send_s` is one message between neighbouring stages, `sender_waits` whether its sender is
    idle meanwhile. `weight_share` is the share of a micro-batch's activations that is kept until the gradients of
    weights are computed. `schedule` is a name
    of `flagcore.physics.schedules.catalogue`.
    """

    schedule: str
    microbatches: int
    virtual: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...] = ()
    paired_s: tuple[float, ...] = ()
    send_s: float
    sender_waits: bool
    weight_share: float = 0.4
