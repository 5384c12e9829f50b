"""Explicit splits of layers over the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flagcore.domain.space import FloatArray, IntArray


class StageLayers(NamedTuple):
    """The contents of one (virtual) pipeline stage.

    `layers` and `mtp` are its numbers of layers and of multi-token prediction (MTP) depths. `embedding` and `loss` are
    1 if the stage has the embedding or the output head, else 0.
    """

    embedding: int = 0
    layers: int = 0
    mtp: int = 0
    loss: int = 0


MANY = 8
"""Most stages of a split whose kinds of layers alone make them differ, so that each of them is predicted."""
SIZES = 6
"""Fields of `stages.Stage` before its numbers of layers of each kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Explicit splits of layers over stages, numbered from 1. Number 0 means that the fields of `Layout` set the split.

    `contents`: the first fields of each `stages.Stage` until its number of layers of each kind, of the shape (splits,
    stages, `SIZES` + kinds).
    `stage_counts`: the number of stages of each split.
    `chunks`: the number of layers of each (virtual) stage in model order, with the shape (splits, virtual stages).
    `distinct_stages`: the indices of the first stage, the second stage and each stage that differs from the previous
    one, with the shape (splits, distinct stages). Shorter splits are padded with the index of their last stage.
    `distinct_counts`: the number of distinct stages of each split, without the padding.
    `exact`: whether stages also differ if only their kinds of layers do, unless more than MANY of a split would.
    """

    contents: FloatArray
    stage_counts: FloatArray
    chunks: FloatArray
    distinct_stages: FloatArray
    distinct_counts: IntArray
    exact: bool

    @classmethod
    def from_contents(
        cls,
        contents: FloatArray,
        stage_counts: FloatArray,
        chunks: FloatArray,
        before: Splits | None = None,
        *,
        exact: bool = False,
    ) -> Splits:
        """Return splits with these contents and numbers of stages, numbered after the splits in `before`."""
        given, counts = [np.zeros((1, *each.shape[1:])) for each in (contents, chunks)], np.ones(1)
        if before is not None:
            given, counts = [before.contents, before.chunks], before.stage_counts
            exact |= before.exact
        contents, chunks = (_joined(*each) for each in zip(given, (contents, chunks), strict=True))
        counts = np.concatenate((counts, stage_counts))
        index, last = np.arange(contents.shape[1]), counts[:, None] - 1.0
        is_distinct, differs = np.ones(contents.shape[:2], dtype=np.bool_), contents[:, 2:] != contents[:, 1:-1]
        is_distinct[:, 2:] = differs[:, :, :SIZES].any(axis=2)
        has_few = exact & ((is_distinct[:, 2:] | differs.any(axis=2)).sum(axis=1) <= MANY)
        is_distinct[:, 2:] |= differs.any(axis=2) & has_few[:, None]
        distinct_stages = np.sort(np.where(is_distinct & (index < last), index, last), axis=1)
        distinct_counts = np.maximum((distinct_stages < last).sum(axis=1), 1)
        return cls(contents, counts, chunks, distinct_stages[:, : distinct_counts.max()], distinct_counts, exact)


def _joined(first: FloatArray, second: FloatArray) -> FloatArray:
    """Return the rows of both arrays, the shorter of which are padded with zeros."""
    longest = max(first.shape[1], second.shape[1])
    padding = [(0, 0)] * (first.ndim - 2)
    return np.concatenate([np.pad(each, [(0, 0), (0, longest - each.shape[1]), *padding]) for each in (first, second)])
