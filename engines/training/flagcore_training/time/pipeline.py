"""Time of the pipeline: the duration of a schedule, from the times of a few representative stages."""

from collections.abc import Sequence

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.critical_path import StageTimes
from flagcore_training.layout import Layout, Training
from flagcore_training.schedules import makespan
from flagcore_training.stages import Stage, StageGroups, depths_received
from flagcore_training.time.passes import Messages, StageTime

REFILL_LAUNCHES = 45.0
"""Kernel launches until a device is busy again after a message, because the host synchronises with each message.

Source of the synchronisation: megatron-core 0.16 `p2p_communication.py`. Fitted to the interleaved runs of one paper:
0.4 to 0.6 ms each."""


def pipeline_time(
    train: Training,
    layout: Layout,
    costs: Costs,
    placement: StageGroups,
    representatives: Sequence[Stage],
    times: list[StageTime],
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds until all stages have finished a step's micro-batches, and the seconds of one message.

    `representatives` are stages of each candidate in order, ending with the last stage, and `times` their times. A
    stage that is not among them equals the previous one.
    """
    messages, blocking, send, mean_message = sends(train, layout, costs, placement, representatives[-1])
    total = layout.microbatches * times[-1].busy
    overlapped = overlapped_passes(train, times)
    for pipeline_size in sorted({*layout.pipeline[layout.pipeline > 1.0].tolist()}):  # np.unique imports numpy.ma
        rows = np.flatnonzero(layout.pipeline == pipeline_size)
        places = _representatives(int(pipeline_size), [stage.index[rows] for stage in representatives]) * rows.size
        places += np.arange(rows.size)

        def of_stages(values: list[FloatArray], rows: IntArray = rows, places: IntArray = places) -> FloatArray:
            return np.concatenate([value.take(rows) for value in values]).take(places)

        name = train.options.schedule or "interleaved"
        forward = of_stages([time.forward.total for time in times])
        backward = of_stages([time.backward.total for time in times])
        send_delays = messages.send_delays(int(pipeline_size), rows, layout, placement)
        if send_delays is not None:
            forward, backward = forward + send_delays[0] * blocking[rows], backward + send_delays[1] * blocking[rows]
        stage_times = StageTimes(
            forward=forward,
            backward_input=backward,
            backward_weight=of_stages([time.weight for time in times]),
            send=send[rows],
            blocking=blocking[rows],
            weight_share=train.weight_share,
            paired=of_stages(overlapped) if overlapped else None,
        )
        total[rows] = makespan(name, stage_times, layout.microbatches[rows], layout.virtual[rows])
    return total, np.where(layout.pipeline > 1.0, mean_message, 0.0)


def sends(
    train: Training, layout: Layout, costs: Costs, placement: StageGroups, last: Stage
) -> tuple[Messages, FloatArray, FloatArray, FloatArray]:
    """Return the messages, whether sends block (1 or 0), and the usual and the mean message time in seconds.

    If sending blocks the sender, each message takes the time of its node group or border, which differs from the usual
    one by `Messages.send_delays`. Otherwise all messages take the mean time.
    """
    messages, blocking = Messages.from_layout(train, layout, costs, placement), sender_waits(train, layout, last)
    refill = blocking * _refill_seconds(costs)
    mean = messages.mean(layout, placement) + refill
    send = np.where(blocking > 0, messages.usual + refill, mean) if messages.between else mean
    return messages, blocking, send, mean


def sender_waits(train: Training, layout: Layout, last: Stage | None = None) -> FloatArray:
    """Return 1 for candidates whose messages block the sender, else 0.

    If the last stage receives depths of multi-token prediction, stages send the shapes of their messages first, and
    wait for the device (megatron-core 0.16 `p2p_communication.py`).
    """
    shapes = False if last is None else depths_received(train.model, last) > 0
    return np.where((layout.virtual > 1.0) & train.options.overlap_p2p_comm & ~np.asarray(shapes), 0.0, 1.0)


def shape_seconds(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the seconds that early multi-token prediction adds to each micro-batch on a stage.

    Messages are then preceded by their shapes, so they do not overlap compute.
    """
    waits, placement = 1.0 - sender_waits(train, layout), StageGroups.from_layout(layout, costs)
    message_s = Messages.from_layout(train, layout, costs, placement).mean(layout, placement)
    return 2.0 * layout.virtual * waits * (message_s + waits * _refill_seconds(costs))


def _refill_seconds(costs: Costs) -> float:
    return REFILL_LAUNCHES * float(np.max([each.kernels.launch_seconds() for each in costs.groups]))


def overlapped_passes(train: Training, times: Sequence[StageTime]) -> list[FloatArray]:
    """Return the time of an overlapped forward and backward of two micro-batches in seconds, for each stage.

    The all-to-alls of tokens overlap kernels. The list is empty for schedules without such pairs. Source: DeepSeek-V3
    report (arXiv 2412.19437), section 3.2.1.
    """
    if train.options.schedule not in ("dualpipe", "dualpipev"):
        return []
    dispatch = [time.forward.expert + time.backward.expert for time in times]
    return [np.maximum(time.busy - each, each) for time, each in zip(times, dispatch, strict=True)]


def _representatives(length: int, indices: list[FloatArray]) -> IntArray:
    """Return the index of the representative of each of a pipeline's `length` stages, as (stages, candidates)."""
    numbers = np.full((length, indices[0].size), -1)
    for index in indices[:-1]:
        for stage in range(int(index.min()), length - 1):
            numbers[stage] += index <= stage
    np.maximum(numbers, 0, out=numbers)
    numbers[-1] = len(indices) - 1
    return numbers
