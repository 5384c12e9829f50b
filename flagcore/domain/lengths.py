"""Lengths of the samples of a training job."""

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import IntArray

PACKED, LONGEST = "packed", "longest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the samples of a training job.

    `values`: lengths in tokens at even quantiles of their distribution, the shortest first.
    `batching`: whether samples are packed into sequences, padded to the longest of a micro-batch, or to the sequence.
    `balanced`: whether each step divides the samples between the replicas so that all take about as long.
    """

    values: tuple[int, ...]
    batching: str = PACKED
    balanced: bool = False

    def cut(self, sequence: int) -> IntArray:
        """Return the lengths of samples that are cut at `sequence` tokens."""
        return np.minimum(np.array(self.values, dtype=np.int64), sequence)

    def tokens(self, sequence: int) -> float:
        """Return the mean number of real tokens of a sample. Packed sequences count as full."""
        return float(sequence if self.batching == PACKED else self.cut(sequence).mean())
