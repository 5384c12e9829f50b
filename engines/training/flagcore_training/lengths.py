"""Micro-batches of samples of several lengths: their tokens, their attention, and the slowest replica of a step.

The formulas of a layer take a micro-batch of sequences of equal length. A micro-batch of several lengths is replaced by
one with the same number of tokens, padding included, and the same number of pairs in attention.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.domain.spec import TrainSpec
from flagcore.domain.work import LONGEST, PACKED, Lengths
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import Notes
from flagcore.spec.schema import LengthsSection, lengths_of
from flagcore.spec.validate import Context
from flagcore_training.layout import AnySizes, Layout, Training

SIZES = 2.0 ** np.arange(11)
"""Numbers of samples of a micro-batch for which padding is computed; others are interpolated."""


PER_SEQUENCE = 16
"""The minimum number of sequences that are packed."""

MOST_TIMES = 256
"""How often each length is packed at most: a sequence may hold more samples than can be packed in a second."""


def best_fit(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the lengths in each pack of at most `most` tokens, each put where it leaves the least space.

    `lengths`: at most `most` each, the longest first.
    """
    space: list[tuple[int, int]] = []  # tokens left and number of each sequence
    found: list[list[int]] = []
    for length in lengths:
        place = bisect_left(space, (length, -1))
        left, number = space.pop(place) if place < len(space) else (most, len(found))
        if number == len(found):
            found.append([])
        found[number].append(length)
        insort(space, (left - length, number))
    return found


USUAL = 0.5
"""The mean length of samples as a share of the longest, which configurations of other tools do not say."""
OFFLINE_MEAN = 400
"""The usual mean length in tokens of samples that Megatron-Bridge packs before a run ("offline"). Packs of Tulu 3 have
83.3 samples per 32,768 tokens and 21.6 per 8,192, which are 380 to 392 tokens each (@067f987d
`examples/model_verification_cards`: gpt-oss-20b, moonlight-16b-a3b)."""
PACKING = re.compile(
    r"(?<![\w-])(?P<no>(?:no|not|non|without)[- _]+(?:sequence[- _]+)?)?(?:\w+_)?pack(?:ed|ing)\b"
    r"(?!\W+(?:off|false|none)\b)",
    re.IGNORECASE,
)
OFFLINE = re.compile(r"\boffline[- _]packing\b|packing\W+offline\b", re.IGNORECASE)
"""What runs of Megatron-Bridge call samples that are packed before the run."""
ASSUMED = "lengths"
"""The name of the lengths among the settings that notes mention."""


def assumed_lengths(longest: int, batching: str, notes: Notes, *, offline: bool = False) -> dict[str, Any]:
    """Return `train.lengths` for a configuration of another tool, and add a note: the mean is assumed."""
    half = max(longest * USUAL, 1)
    mean = min(half, OFFLINE_MEAN) if offline else half
    why = "half of seq_length" if mean == half else "usual of samples that are packed offline"
    text = f"{mean:g} is {why}: write the mean of your data, or its histogram"
    notes.note("train.lengths.mean", text, "train.lengths")
    return {"mean": mean, "batching": batching}


def noted_lengths(sequence: int, notes: str) -> Lengths | None:
    """Return the lengths that are assumed for a published run whose notes say that samples are packed, or None."""
    if not any(found["no"] is None for found in PACKING.finditer(notes)):
        return None
    section = assumed_lengths(sequence, PACKED, Notes(), offline=OFFLINE.search(notes) is not None)
    return lengths_of(LengthsSection(**section), Context())


def cut_warnings(train: TrainSpec) -> list[str]:
    """Return a line if samples are longer than the sequence, which cuts them."""
    share = float(np.mean(np.array(train.lengths.values) > train.seq_length)) if train.lengths else 0.0
    text = N_("by train.lengths, {percent:.1f}% of samples are longer than train.seq_length = {length}, and are cut")
    return [_(text, percent=100.0 * share, length=train.seq_length)] if share else []


def length_warnings(train: TrainSpec, noted: Collection[str]) -> list[str]:
    """Return a line if the lengths of a job record are assumed. `noted`: the settings that its notes mention."""
    if ASSUMED not in noted or not train.lengths:
        return []
    mean = round(float(np.mean(train.lengths.values)))
    return [
        _("packed samples are assumed to have {mean} tokens in the mean: give train.lengths of the data", mean=mean)
    ]


@lru_cache(maxsize=64)
def packs(lengths: Lengths, sequence: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the samples in each packed sequence, by best fit of the longest first.

    The emptiest sequence is left out, because other samples would fill it.
    """
    values = lengths.cut(sequence)
    times = min(max(-(-PER_SEQUENCE * sequence // int(values.sum())), 1), MOST_TIMES)
    found = best_fit(np.repeat(values, times)[::-1].tolist(), sequence)
    if len(found) > 1:
        found.remove(min(found, key=sum))
    return tuple(map(tuple, found))


def one_by_one(train: Training) -> float:
    """Return the number of sequences of a pack on which operations run one by one; 0 if they run on all together."""
    lengths = train.lengths
    if not train.options.one_by_one or lengths is None or lengths.batching != PACKED:
        return 0.0
    found = packs(lengths, train.sequence)
    return sum(map(len, found)) / len(found)


class Padded(NamedTuple):
    """Micro-batches of `SIZES` samples, all as long as the longest: mean length and mean square of the length.

    Both are expected values of the longest of independent samples.
    """

    length: FloatArray
    square: FloatArray

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, lengths: Lengths, sequence: int) -> Padded:
        values = lengths.cut(sequence).astype(np.float64)
        below = np.arange(values.size + 1.0)[:, None] / values.size
        shares = np.diff(below**SIZES, axis=0)
        return cls(values @ shares, values**2 @ shares)


def in_time(train: Training, layout: AnySizes) -> AnySizes:
    """Return the layout for formulas of time: its micro-batches have as many tokens of the whole `train.sequence` as
    those of several lengths have on average."""
    if train.lengths is None or train.lengths.batching != LONGEST:
        return layout
    share = Padded.of(train.lengths, train.sequence).length / train.sequence
    return replace(layout, micro_batch=layout.micro_batch * np.interp(layout.micro_batch, SIZES, share))


def attention_length(train: Training, micro_batch: FloatArray) -> FloatArray | float:
    """Return the length of sequences of equal length that have as many tokens and pairs as those of a micro-batch.

    `micro_batch`: as in `in_time`.
    """
    lengths = train.lengths
    if lengths is None or lengths.batching not in (PACKED, LONGEST):
        return float(train.sequence)
    if lengths.batching == PACKED:
        samples = np.array([length for each in packs(lengths, train.sequence) for length in each], dtype=float)
        return float((samples**2).sum() / samples.sum())
    padded = Padded.of(lengths, train.sequence)
    return np.asarray(np.interp(micro_batch, SIZES * padded.length / train.sequence, padded.square / padded.length))


def slowest(train: Training, layout: Layout, square_share: float, *, each_micro_batch: bool) -> FloatArray:
    """Return the time of the slowest replica of a step over the mean of all, for each candidate.

    The sums of the replicas are taken as normally distributed, with Blom's formula for the largest of them. Samples
    that are divided by their times (`Lengths.balanced`) leave no difference, but a sample is not divided.

    `square_share`: the cost of a token's attention over that of its other products, for each token of its sequence.
    `each_micro_batch`: whether replicas wait for each other in each micro-batch, as with sharded weights.
    """
    ones = np.ones_like(layout.data)
    if train.lengths is None or train.lengths.balanced:
        return ones
    if train.lengths.batching == PACKED:
        costs = np.array(
            [sum(each) + square_share * sum(n**2 for n in each) for each in packs(train.lengths, train.sequence)],
            dtype=float,
        )
        spread = ones * float(costs.std() / costs.mean()) / np.sqrt(layout.micro_batch)
    elif train.lengths.batching == LONGEST:
        padded = Padded.of(train.lengths, train.sequence)
        values = train.lengths.cut(train.sequence).astype(np.float64)
        relative = np.sqrt(np.maximum(padded.square / padded.length**2 - 1.0, 0.0))
        # a cost that grows with the square varies twice as much as the length
        quadratic = square_share * padded.length / (1.0 + square_share * padded.length)
        spread = np.interp(layout.micro_batch, SIZES, relative * (1.0 + quadratic)) * (values.std() > 0)
    else:
        return ones
    waits = ones if each_micro_batch else layout.microbatches
    normal = NormalDist()
    replicas = np.maximum(layout.data, 1.0)
    largest = np.array([normal.inv_cdf((each - 0.375) / (each + 0.25)) if each > 1 else 0.0 for each in replicas.flat])
    return np.asarray(1.0 + np.maximum(largest.reshape(replicas.shape), 0.0) * spread / np.sqrt(waits))
