"""What the engines of this distribution share: their chips, and the rules of engines that do not divide prompts."""

from collections.abc import Iterator, Sequence

import numpy as np
from flagcore_importers.programs import grouped
from flagcore_serving.engine import ServingEngine
from flagcore_serving.space import rules
from flagcore_serving.space.hardware import DP, EP, TP, longest_request

from flagcore.contracts import Platform
from flagcore.domain.space import Columns, IntArray, Rule
from flagcore.domain.spec import Task
from flagcore.errors import NoDevice
from flagcore.i18n import N_, _


class OneVendor(ServingEngine):
    """An engine for the chips of one `vendor`, that of their plugin, written from its documentation."""

    vendor: str
    untested = "support was written from the documentation, and no trial has run; predicted times include only kernels"

    def complete(self, platform: Platform, *, runs_here: bool, plan: bool) -> Platform:
        """See `Engine`. Raises NoDevice for other chips."""
        for chip in (group.chip for group in platform.task.cluster.groups if group.chip.vendor != self.vendor):
            why = _("it runs only on chips of the vendor {vendor}", vendor=self.vendor)
            raise NoDevice(_("{engine} does not run on {chip}: {why}", engine=self.name, chip=chip.name, why=why))
        return super().complete(platform, runs_here=runs_here, plan=plan)


def longest_prompt(task: Task) -> int:
    """Return the tokens of the longest prompt, or of the longest request if a trace has its length."""
    loads = task.spec.serve.loads
    return longest_request(task) - max(0 if load.trace else load.output_len for load in loads)


def prefill_tokens(task: Task, codes: IntArray, default: int) -> IntArray:
    """Return the prompt tokens of an iteration: the knob's, or else `default` or the longest prompt."""
    return np.where(codes > 0, codes, max(default, longest_prompt(task)))


def expert_parallel(task: Task) -> Rule:
    """Return the rule that the groups of experts divide the ranks and the experts."""
    experts = task.spec.model.experts or 1
    return rules.rule(
        "expert_parallel",
        (TP, DP, EP),
        N_("{EP} must divide {TP} x {DP}, and the {experts} experts"),
        lambda c: (c[EP] > 1) & (((c[TP] * c[DP]) % c[EP].clip(1) != 0) | (experts % c[EP].clip(1) != 0)),
        experts=experts,
    )


def whole_prompts(task: Task, knob: str, chunked: str = "") -> Rule:
    """Return the rule that an iteration holds the longest prompt, unless the flag `chunked` divides prompts."""
    longest = longest_prompt(task)

    def broken(c: Columns) -> np.ndarray:
        is_whole = c[chunked] == 0 if chunked else np.ones(c[knob].shape, dtype=np.bool_)
        return (c[knob] > 0) & (c[knob] < longest) & is_whole

    return rules.rule(
        "whole_prompts",
        (knob, *([chunked] if chunked else [])),
        N_("{knob} must be at least {longest}, the tokens of the longest prompt, which is not divided"),
        broken,
        knob=knob,
        longest=longest,
    )


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the flags of a command line without dashes, each with its value or None."""
    for word, _value, following, _place in grouped(words, lambda word: (word * word.startswith("--"), "", "")):
        if word:
            yield word.removeprefix("--"), following[0] if following else None
