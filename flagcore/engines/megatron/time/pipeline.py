"""Time of the pipeline: from a few representative stages to the makespan of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import Layout, Placement, Training, pick
from flagcore.engines.megatron.parallel.pipeline import Stage
from flagcore.engines.megatron.time.exchange import Messages
from flagcore.engines.megatron.time.passes import StageTime
from flagcore.engines.schedules.critical_path import StageTimes
from flagcore.engines.schedules.formulas import makespan

REFILL_LAUNCHES = 45.0
"""Launches until a device is busy again after a message for which the host waited (megatron-core 0.16
`p2p_communication.py` synchronises after each). Fitted to the interleaved runs of one paper: 0.4 to 0.6 ms
each."""


def pipeline_time(
    train: Training, layout: Layout, costs: Costs, place: Placement, found: Sequence[Stage], times: Sequence[StageTime]
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds in which all stages are through with a step's micro-batches, and those of one message.

    Where sending blocks, a stage before or behind the border of two node groups works for as much longer as its
    messages take over it; else all messages take the mean. `found` are stages in their order, the last one last; one
    that is not among them is like the one before it.
    """
    messages, blocking = Messages.of(train, layout, costs, place), sender_waits(train, layout)
    refill = blocking * _refill_seconds(costs)
    mean = messages.mean(layout, place) + refill
    send = mean if messages.longer is None else np.where(blocking > 0, messages.usual + refill, mean)
    total = layout.microbatches * times[-1].busy
    paired = together(train, times)
    for length in np.unique(layout.pipeline[layout.pipeline > 1.0]):
        rows = np.flatnonzero(layout.pipeline == length)
        some = layout[rows]
        which = _distinct_lengths(int(length), [stage.index[rows] for stage in found])

        def of(values: list[FloatArray], which: list[IntArray] = which, rows: IntArray = rows) -> FloatArray:
            column = [value[rows] for value in values]
            return np.stack([pick(chosen, column) for chosen in which])

        name = train.options.schedule or "interleaved"
        forward, backward = of([time.forward.total for time in times]), of([time.backward.total for time in times])
        send_delays = messages.send_delays(int(length), rows, layout, place)
        if send_delays is not None:
            forward, backward = forward + send_delays[0] * blocking[rows], backward + send_delays[1] * blocking[rows]
        stage_times = StageTimes(
            forward=forward,
            backward_input=backward,
            backward_weight=of([time.weight for time in times]),
            send=send[rows],
            blocking=blocking[rows],
            weight_share=train.weight_share,
            paired=of(paired) if paired else None,
        )
        total[rows] = makespan(name, stage_times, some.microbatches, some.virtual)
    return total, np.where(layout.pipeline > 1.0, mean, 0.0)


def sender_waits(train: Training, layout: Layout) -> FloatArray:
    """Return 1 where the sender of a message computes nothing while it sends, else 0."""
    return np.where((layout.virtual > 1.0) & train.options.overlap_p2p_comm, 0.0, 1.0)


def message_seconds(train: Training, layout: Layout, costs: Costs, place: Placement) -> FloatArray:
    """Return the seconds of one message between two stages: the mean over a pipeline's borders."""
    refill = sender_waits(train, layout) * _refill_seconds(costs)
    return Messages.of(train, layout, costs, place).mean(layout, place) + refill


def _refill_seconds(costs: Costs) -> float:
    return REFILL_LAUNCHES * float(np.max([each.kernels.launch_seconds() for each in costs.groups]))


def together(train: Training, times: Sequence[StageTime]) -> list[FloatArray]:
    """Return a forward and a backward of two micro-batches that run together: exchange of tokens hides behind kernels.

    Empty where the schedule does not pair them. Source: DeepSeek-V3 report (arXiv 2412.19437), section 3.2.1.
    """
    if train.options.schedule not in ("dualpipe", "dualpipev"):
        return []
    exchanged = [time.forward.expert + time.backward.expert for time in times]
    return [np.maximum(time.busy - each, each) for time, each in zip(times, exchanged, strict=True)]


def _distinct_lengths(length: int, indices: list[FloatArray]) -> list[IntArray]:
    """Return, for each stage of a pipeline, which of the found ones represents it, one per candidate."""
    last = len(indices) - 1
    before = np.stack([np.where(index < length - 1, index, np.inf) for index in indices[:-1]])
    chosen = [np.maximum(np.count_nonzero(before <= place, axis=0), 1) - 1 for place in range(length - 1)]
    return [*chosen, np.full(indices[0].shape, last)]
