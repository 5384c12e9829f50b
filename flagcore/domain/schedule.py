"""Pipeline schedules by name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The properties of a pipeline schedule.

    `parts`: the number of virtual stages per device. 0 means the number in the candidate.
    `copies`: the number of copies of parameters, gradients and optimizer state per device.
    `splits_backward`: whether the gradients of activations and of weights are computed in separate passes, so that
    kernels read their inputs twice.
    `post_validation`: whether stages skip the synchronization before the optimizer. The time of a step is then the
    longest time of one stage, from its first forward pass to its last backward pass.
    """

    parts: int = 1
    copies: int = 1
    splits_backward: bool = False
    post_validation: bool = False

    @property
    def folded(self) -> bool:
        """Whether device r of p holds the parts r and 2p - 1 - r, so that the first device also holds the last part."""
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
"""The supported schedules by name."""
