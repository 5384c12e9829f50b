"""The passes of a pipeline: what a timeline of a training step is drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch on each pipeline stage of one candidate, in order; all its virtual stages together.

    `backward_s` has recomputation, and the gradients of activations and weights; `weight_s` is what of it the
    gradients of weights take, which some schedules run apart; empty where that is not known. `paired_s` is a forward
    and a backward of two micro-batches that run together, empty where none do. `send_s` is one message from a stage
    to the next, `sender_waits` says that its sender computes nothing meanwhile. `weight_share` is the share of a
    micro-batch's activations that waits for the gradients of weights, as a schedule is planned. `schedule` is a name
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
