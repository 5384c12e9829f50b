"""The kind of job `rl`: its trainer, its rollout, the samples of a step, and how many micro-batches hold them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval
from flagcore_training.lengths import best_fit

from flagcore.domain.model import Model
from flagcore.domain.space import IntArray
from flagcore.domain.spec import TOKENS_PER_SECOND_PER_DEVICE, Adapter, SettingValue, Task
from flagcore.domain.units import OneOf, Size, Wait, Word
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
    """The trainer. With an `adapter`, the frozen weights are those of the reference."""

    engine: str
    """Name of the training engine."""
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    """Settings of the training engine, as in train.settings."""
    offload: Annotated[str, OneOf(("none", "optimizer", "all"))] = "optimizer"
    """What a colocated trainer moves to the host's memory while answers are generated."""
    adapter: Adapter | None = None
    """Low-rank adapters that are trained instead of the weights, as in train.adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRole:
    """The rollout, which generates answers."""

    engine: Word
    """Name of the serving engine, such as vllm or sglang."""
    precision: str | None = None
    """Number format of its weights; null: that of the trainer."""
    engine_version: Word | None = None
    """Version of the serving engine, such as 0.11.2; null: the newest that flagcore knows."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the serving engine, as in serve.engine_args."""
    sleeps: bool = True
    """Whether a colocated rollout frees its memory while the trainer runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSpec(Work):
    """A job of reinforcement learning.

    A step generates `samples` answers to each of `prompts` prompts, computes their log-probabilities, trains on them in
    mini-batches, and gives the new weights to the rollout.
    """

    kind: ClassVar[str] = "rl"
    paths: ClassVar[tuple[tuple[str, ...], ...]] = (("prompt_len", "file"), ("answer_len", "file"), ("reward", "model"))
    documents: ClassVar[str] = "flagcore_rl.documents"
    records: ClassVar[str] = "flagcore_rl.documents"
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
    """The training engine."""
    rollout: RolloutRole
    """The engine that generates answers."""
    prompts: Size
    """Prompts of a step."""
    samples: Size
    """Answers to each prompt."""
    prompt_len: Lengths
    """Lengths of prompts."""
    answer_len: Lengths
    """Lengths of answers; the longest is the maximum of the run."""
    algorithm: Annotated[str, OneOf(("grpo", "dapo", "gspo", "rloo", "reinforce", "ppo"))] = "grpo"
    """Algorithm; ppo has a critic unless `critic` is false."""
    mini_batch: Size | None = None
    """Samples of an optimizer step; null: all samples of a step."""
    epochs: Annotated[int, Interval(ge=1, le=1000)] = 1
    """Times that a step trains on each sample."""
    old_logprobs: bool = True
    """Whether the trainer computes the policy's log-probabilities before it trains."""
    reference: bool = False
    """Whether a reference model's log-probabilities are computed."""
    critic: bool = False
    """Whether a critic of the policy's size is trained, and computes values."""
    reward: Model | None = None
    """The reward model, which the trainer's devices compute; null: rewards are computed by functions."""
    staleness: Annotated[int, Interval(ge=0, le=1000)] = 0
    """Steps by which the rollout's weights may lag; 0: on-policy. Above 0, generation and training may overlap."""
    packing: bool = True
    """Whether micro-batches are packed up to a number of tokens; otherwise they have a number of samples."""
    reward_s: Wait | None = None
    """Seconds of a step for rewards and data, which overlap with nothing; null: usual ones of the framework."""
    context: int | None = None
    """The model's context length in tokens. None means an unknown one."""
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


BLOCK = 64
"""Samples of similar length that are next to each other, so that rollouts of any usual size get equal parts."""


@lru_cache(maxsize=256)
def quantiles(lengths: Lengths, count: int) -> tuple[int, ...]:
    """Return `count` lengths at even quantiles of the distribution, the longest first."""
    if lengths.values:
        places = (np.arange(count, 0, -1) - 0.5) / count * len(lengths.values)
        return tuple(np.array(lengths.values)[places.astype(np.int64)].tolist())
    places = (np.arange(count, 0, -1) - 0.5) / count
    values = np.exp(lengths.spread * np.array([*map(NormalDist().inv_cdf, places.tolist())]))
    low, high = 0.0, lengths.longest / float(values.min())
    for _time in range(60):
        scale = (low + high) / 2
        cut = np.minimum(values * scale, lengths.longest)
        low, high = (scale, high) if cut.mean() < lengths.mean else (low, scale)
    return tuple(np.maximum(np.rint(cut), 1).astype(np.int64).tolist())


@lru_cache(maxsize=64)
def requests_of(samples: Samples) -> tuple[tuple[int, int], ...]:
    """Return the lengths of the prompt and the answer of each sample of a step, in the order of the requests.

    Blocks of samples of similar length are shuffled. In each, the longest is first, so that the first of several
    rollouts, which divide the requests in turn, is the last to end.
    """
    count, rng = samples.prompts * samples.answers, np.random.default_rng(0)
    answers = np.array(quantiles(samples.answer_len, count))
    starts = rng.permutation(-(-count // BLOCK)) * BLOCK
    order = (starts[:, None] + np.arange(BLOCK)).ravel()
    prompts = rng.permutation(quantiles(samples.prompt_len, samples.prompts))
    pairs = zip(np.resize(prompts, count).tolist(), answers[order[order < count]].tolist(), strict=True)
    return tuple(pairs)


@lru_cache(maxsize=64)
def tokens_of(samples: Samples) -> IntArray:
    """Return the tokens of each sample of a step, prompt and answer. The array is shared."""
    return np.asarray(np.array(requests_of(samples), dtype=np.int64).sum(axis=1))


@lru_cache(maxsize=256)
def packs(samples: Samples, number: int, most: int) -> tuple[int, int]:
    """Return into how many micro-batches of at most `most` tokens best fit packs `number` of the samples, and the
    tokens of the longest one.
    """
    tokens = np.sort(tokens_of(samples))[::-1]
    picked = tokens[np.linspace(0, tokens.size - 1, number).round().astype(np.int64)]
    found = best_fit(picked.tolist(), most)
    return len(found), max(map(sum, found))
