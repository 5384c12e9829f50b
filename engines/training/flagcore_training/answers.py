"""Compares the losses and gradient norms of a trial with those of the baseline.

The first two steps of flagcore's trial program have the initial weights, which are the same in all layouts, and the
second step has the samples of the first one in another order: the baseline's difference between both is its own noise,
at least that of NOISE. In later steps, and in logs of users' programs, the limit is the share `control.answers`.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.files import read_regular
from flagcore.domain.knob import ANSWERS
from flagcore.domain.spec import Task
from flagcore.domain.trial import Answers
from flagcore.errors import FlagError
from flagcore.i18n import N_
from flagcore_training.reading import INVALID_JSON, STEPS

*_, SEEDS, CHANGES = ANSWERS
USUAL_NOISE = (5e-5, 5e-4)
NOISE = {"fp32": (1e-6, 1e-4), "fp16": (1e-5, 1e-4)}
"""The least relative noise of the loss and of the gradient norm, by precision; that of bf16 is USUAL_NOISE.

On a CPU with megatron-core 0.16.1, layouts differ by up to 1e-7 and 7.5e-5 in fp32 (DP 2 and TP 2 of
examples/train-cpu.yaml: a norm is a long sum in fp32), and by 1e-5 and 2e-4 in bf16. Kernels of GPUs, which were not
measured, may differ by more, so that the values of bf16 are larger."""
MOST_NOISES = 10.0
"""The largest difference that counts as noise. Chosen by hand: a lost block of attention or a rank's part of a sum
change loss or norm by more in all precisions; a fifth of the tokens of experts in fp32, but not always in bf16."""
NORMS = 10.0
"""Where gradient norms may differ, they may differ by more than losses by this factor. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class Record:
    """The losses and gradient norms of a trial's steps. `is_own`: whether flagcore's trial program wrote them."""

    losses: Sequence[float | None]
    norms: Sequence[float | None]
    is_own: bool = False


def program_record(folder: str) -> Record:
    """Return the steps that a trial program has written."""
    losses, norms = list[float | None](), list[float | None]()
    with suppress(OSError, *INVALID_JSON):
        for line in read_regular(Path(folder, STEPS)).decode().splitlines():
            step = json.loads(line)
            losses.append(step["loss"])
            norms.append(step["grad_norm"])
    return Record(losses, norms, is_own=True)


def compared(task: Task, change: str, own: Record, base: Record) -> Answers | None:
    """Return the difference of a trial to the baseline that is largest relative to its limit; None without losses.

    `change`: as in `Engine.answers`. Raises FlagError if the loss is constant, or if answers change and no loss is
    known.
    """
    if len(own.losses) > 2 and len({*own.losses}) == 1 < len({*base.losses}):
        raise FlagError(f"the loss is {own.losses[0]} in all steps: no step changes the parameters")
    found = list(_differences(task, change, own, base))
    if not found and change == CHANGES:
        raise FlagError("its knobs change answers, and the logs of it and the baseline state no loss to compare")
    return max(found, key=lambda each: each.difference / each.limit, default=None)


def _differences(task: Task, change: str, own: Record, base: Record) -> Iterator[Answers]:
    count, limit = min(len(own.losses), len(base.losses)), task.spec.control.answers or 1e-9
    has_seeds = change == SEEDS and not base.is_own
    if count:
        most = max(limit, _spread(base.losses)) if has_seeds else limit
        yield from _difference("loss", own.losses, base.losses, count - 1, (1.0, most), N_("of the loss"))
    if change == CHANGES or not base.is_own:
        if not has_seeds:
            norms = own.norms, base.norms
            yield from _difference("gradient norm", *norms, 0, (1.0, NORMS * limit), N_("of the gradient norm"))
        return
    noises = NOISE.get(task.spec.train.precision, USUAL_NOISE)
    figures = {"loss": (own.losses, base.losses), "gradient norm": (own.norms, base.norms)}
    for (name, (mine, theirs)), least in zip(figures.items(), noises, strict=True):
        unit = max(least, _relative(*theirs[:2]) if len(theirs) > 1 else 0.0)
        for step in range(min(count, 2)):
            yield from _difference(name, mine, theirs, step, (unit, MOST_NOISES), N_("of the engine's own noise"))


def _difference(
    name: str,
    own: Sequence[float | None],
    base: Sequence[float | None],
    step: int,
    scale: tuple[float, float],
    unit: str,
) -> Iterator[Answers]:
    """Yield the difference of a figure in a step, if both trials have it. `scale`: one unit, and the limit in units."""
    if len(own) > step and len(base) > step and own[step] is not None and base[step] is not None:
        text = f"{name} {own[step]:.6g} instead of {base[step]:.6g} in step {step + 1}"
        relative = _relative(base[step], own[step])
        yield Answers(difference=relative / scale[0], limit=scale[1], unit=unit, text=text)


def _spread(losses: Sequence[float | None]) -> float:
    """Return half the range of the changes of a loss from step to step, relative to the last loss.

    With other samples, or other initial weights, losses differ by as much.
    """
    known = [each for each in losses if each]
    changes = [after - before for before, after in itertools.pairwise(known)]
    return (max(changes) - min(changes)) / 2.0 / known[-1] if changes else 0.0


def _relative(first: float | None, second: float | None) -> float:
    """Return the difference of two figures relative to the first one. 0 if one is unknown."""
    return abs(second / first - 1.0) if first and second is not None else 0.0
