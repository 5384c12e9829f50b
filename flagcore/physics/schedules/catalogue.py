"""Pipeline schedules by name, and their properties."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Properties of a schedule.

    `parts` is the number of virtual stages per device; 0: that of the candidate. `copies` is how often a device
    holds parameters, gradients and optimizer state. `splits_backward`: the gradients of activations and of weights
    are separate passes, so kernels read their inputs twice. `post_validation`: its authors run it without
    synchronizing all stages before the optimizer; a step then takes the longest span of one stage, from its first
    forward to its last backward.
    """

    parts: int = 1
    copies: int = 1
    splits_backward: bool = False
    post_validation: bool = False

    @property
    def folded(self) -> bool:
        """Whether device r of p holds the parts r and 2p - 1 - r, so the first device also holds the last part."""
        return self.parts == 2 and self.copies == 1


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "interleaved": Schedule(parts=0),
    "zb-h1": Schedule(splits_backward=True),
    "zb-h2": Schedule(splits_backward=True, post_validation=True),
    "zb-1p": Schedule(splits_backward=True, post_validation=True),
    "zb-2p": Schedule(splits_backward=True, post_validation=True),
    "zb-v": Schedule(parts=2, splits_backward=True, post_validation=True),
    "v-half": Schedule(parts=2, splits_backward=True, post_validation=True),
    "v-min": Schedule(parts=2, splits_backward=True, post_validation=True),
    "dualpipe": Schedule(parts=2, copies=2, splits_backward=True),
    "dualpipev": Schedule(parts=2, splits_backward=True),
}
"""The schedules that are modelled, by name."""
