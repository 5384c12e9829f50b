"""The kind of job `rl`: its trainer, its rollout, and the samples of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from flagcore.domain.model import Model
from flagcore.domain.spec import TOKENS_PER_SECOND_PER_DEVICE, Adapter, SettingValue, Task
from flagcore.domain.work import Work
from flagcore.i18n import _
from flagcore.spec.shapes import Shape

SPREAD = 0.7
"""The default of `Lengths.spread`. Answers to mathematical questions vary so (a standard deviation of 0.8 means)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens, of which those above `longest` are cut to it: log-normal ones, or `values`.

    `mean`: the mean after cutting.
    `spread`: the standard deviation of the logarithm before cutting. 0: all lengths are equal.
    `values`: lengths at even quantiles of their distribution, the shortest first; empty for log-normal ones.
    """

    mean: float
    longest: int
    spread: float = SPREAD
    values: tuple[int, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the section of a job record."""
        if not self.values:
            return {"mean": self.mean, "longest": self.longest, "spread": self.spread}
        histogram = {str(length): number for length, number in Counter(self.values).items()}
        return {"histogram": histogram, "longest": self.longest}


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step: the number of prompts, answers to each of them, and lengths."""

    prompts: int
    answers: int
    prompt_len: Lengths
    answer_len: Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRole:
    """The trainer: the name of its engine, and settings of that engine.

    `offload`: what moves to the host while a colocated rollout generates: `none`, `optimizer` or `all`. With an
    `adapter`, the frozen weights are those of the reference.
    """

    engine: str
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    offload: str = "optimizer"
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRole:
    """The rollout: the name, the release and flags of its engine, and the number format of its weights.

    `sleeps`: whether a colocated rollout frees its memory while the trainer runs.
    """

    engine: str
    precision: str | None = None
    engine_version: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    sleeps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSpec(Work):
    """A job of reinforcement learning.

    A step generates `samples` answers to each of `prompts` prompts, computes their log-probabilities, trains on them in
    mini-batches, and gives the new weights to the rollout.

    `mini_batch`: the number of samples of an optimizer step. None means all samples of a step.
    `epochs`: how many times a step trains on each sample.
    `old_logprobs`: whether the trainer computes the log-probabilities of the policy before it trains.
    `reference`: whether the log-probabilities of a reference model are computed, too.
    `critic`: whether a critic of the policy's size is trained, and computes values.
    `reward`: the model whose forward passes on the trainer's devices reward the answers. None means functions.
    `staleness`: the maximum number of steps by which the weights of the rollout may lag. With 0, a step waits for its
    own samples.
    `packing`: whether micro-batches are packed up to a number of tokens. Otherwise they have a number of samples.
    `reward_s`: the seconds of a step for rewards that overlap with nothing. None means those of the engine.
    `context`: the model's context length in tokens. None means an unknown one.
    """

    kind: ClassVar[str] = "rl"
    paths: ClassVar[tuple[tuple[str, ...], ...]] = (("prompt_len", "file"), ("answer_len", "file"), ("reward", "model"))
    documents: ClassVar[str] = "flagcore_rl.documents"
    records: ClassVar[str] = "flagcore_rl.records"
    default_objective: ClassVar[str] = TOKENS_PER_SECOND_PER_DEVICE
    cheapest_objective: ClassVar[str] = TOKENS_PER_SECOND_PER_DEVICE

    example: ClassVar[Mapping[str, Any]] = {
        "trainer": TrainerRole(engine="fsdp2"),
        "rollout": RolloutRole(engine="vllm"),
        "prompts": 2,
        "samples": 2,
        "prompt_len": Lengths(mean=8, longest=8),
        "answer_len": Lengths(mean=8, longest=8),
    }
    """What the job of a check of plugins has."""

    trainer: TrainerRole
    rollout: RolloutRole
    prompts: int
    samples: int
    prompt_len: Lengths
    answer_len: Lengths
    algorithm: str = "grpo"
    mini_batch: int | None = None
    epochs: int = 1
    old_logprobs: bool = True
    reference: bool = False
    critic: bool = False
    reward: Model | None = None
    staleness: int = 0
    packing: bool = True
    reward_s: float | None = None
    context: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def step_samples(self) -> int:
        return self.prompts * self.samples

    @property
    def step_tokens(self) -> int:
        return round(self.step_samples * (self.prompt_len.mean + self.answer_len.mean))

    @property
    def drawn(self) -> Samples:
        """What determines the lengths of the samples of a step."""
        return Samples(self.prompts, self.samples, self.prompt_len, self.answer_len)

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt with the longest answer."""
        return self.prompt_len.longest + self.answer_len.longest

    @property
    def optimizer_samples(self) -> int:
        """The number of samples of an optimizer step."""
        return min(self.mini_batch or self.step_samples, self.step_samples)

    @property
    def runs_as(self) -> str:
        return _("as rl.command runs it") if self.command else ""

    @property
    def missing(self) -> str:
        return "" if self.command else "command"

    def with_samples(self, samples: int) -> RlSpec:
        prompts = max(samples // self.samples, 1)
        mini = self.mini_batch and max(self.mini_batch * prompts // self.prompts, 1)
        return replace(self, prompts=prompts, mini_batch=mini)

    def with_flags(self, flags: tuple[str, ...]) -> RlSpec:
        return replace(self, flags=flags)

    def with_advice(self, section: str, name: str, value: SettingValue, knobs: Collection[str]) -> RlSpec:
        return self

    def distance(self, other: RlSpec) -> float:
        """Return how much another job differs, as for training, and by 1 if only one of them overlaps its phases."""
        scale: float = abs(math.log2(self.longest / other.longest))
        stale = bool(self.staleness) != bool(other.staleness)
        return float(self.precision != other.precision) + float(stale) + scale / 4

    def record(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """Return the section of a job record."""
        values = {**asdict(self), "prompt_len": self.prompt_len.record(), "answer_len": self.answer_len.record()}
        if self.reward:
            shape = {name: getattr(self.reward, name) for name in Shape.model_fields}
            values["reward"] = {"model": {name: value for name, value in shape.items() if value is not None}}
        unwritten = ("command", "directory", "flags", "context")
        return {name: value for name, value in values.items() if name not in unwritten}


def job_of(task: Task) -> RlSpec:
    """Return the job of a task. Raises TypeError for a job of another kind."""
    if not isinstance(task.spec.work, RlSpec):
        raise TypeError("this spec has no job of reinforcement learning")
    return task.spec.work
