"""Knobs of serving engines: the common ones, and how specs, job records and `engine_args` set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import SHARES, Flag, Knob
from flagcore.domain.objective import is_rate
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, SIZES, TP, Hardware, most_in_flight
from flagcore.errors import SpecError

IMPLIED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys((INSTANCES, TP, PP, DP, EP), (None, 1)),
    **dict.fromkeys((SIZES, "max_num_seqs", "max_num_batched_tokens", "block_size"), (None,)),
    "enforce_eager": (None, False),
}
"""Knobs that every job record may have, and the values that an engine without the knob has anyway."""


class EngineArgs(NamedTuple):
    """`engine_args` of a spec: the knobs that they fix for all candidates, and the flags that are not knobs."""

    fixed: dict[str, KnobValue]
    others: dict[str, EngineArg]


class SizesKnob(Knob):
    """The devices of each instance, as a word such as 4+2+2. Its words depend on the task."""

    def parse(self, value: object, key: str) -> KnobValue:
        return None if value is None else heterogeneous.parse_sizes(value, key)


def axes(task: Task, knobs: Sequence[Knob], fixed: Mapping[str, KnobValue]) -> tuple[Axis, ...]:
    """Return the axes of all knobs: the values that the spec names, or the fixed or neutral value.

    Raises SpecError for a key of the space that is not a knob.
    """
    baseline = task.spec.baseline or {}
    for given, where in ((task.spec.space, "space"), (baseline, "baseline")):
        _knobs_by_key(given, knobs, task.spec.serve.engine, f"auto_tuner.{where}.")
    found = []
    for knob in knobs:
        if knob.name == SIZES:
            knob = replace(knob, words=heterogeneous.words(task))
        value = fixed.get(knob.name, knob.neutral)
        own = knob.named_in(baseline)
        also = [value, knob.neutral, *([] if own is None else [knob.parse(own, f"auto_tuner.baseline.{knob.name}")])]
        found.append(knob.axis(knob.parse_space(task, [value]), also))
    return tuple(found)


def parse(values: Mapping[str, object], knobs: Sequence[Knob], engine: str) -> dict[str, KnobValue]:
    """Return the knob values of a spec or a job record. Raises SpecError."""
    named = _knobs_by_key(values, knobs, engine, "")
    return {knob.name: knob.parse(values[key], key) for key, knob in named.items()}


def _knobs_by_key(given: Mapping[str, object], knobs: Sequence[Knob], engine: str, where: str) -> dict[str, Knob]:
    """Return the knob behind each key. Raises SpecError for an unknown key, and for two keys of one knob."""
    by_name = {name: knob for knob in knobs for name in knob.names}
    found: dict[str, Knob] = {}
    for key, value in given.items():
        knob = by_name.get(key)
        if knob is None:
            if value in IMPLIED.get(key, ()):
                continue
            own = [knob.name for knob in knobs]
            near = get_close_matches(str(key), own, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"its knobs: {', '.join(own)}"
            raise SpecError(key=f"{where}{key}", problem=f"is not a knob of {engine}", fix=fix)
        other = next((other for other, same in found.items() if same is knob), None)
        if other is not None:
            raise SpecError(key=f"{where}{key}", problem=f"is the same knob as {other}", fix="give one of the two")
        found[key] = knob
    return found


def split_arguments(args: Mapping[str, EngineArg], knobs: Sequence[Knob]) -> EngineArgs:
    """Return what `engine_args` set, a knob by its own name or by its flag. Raises SpecError."""
    by_name = {
        bare(word): (knob, flag) for knob in reversed(knobs) for flag in knob.flags for word in (flag.name, flag.off)
    }
    found = EngineArgs({}, {})
    for key, value in args.items():
        name = bare(key)
        knob = next((each for each in knobs if each.name == name.replace("-", "_")), None)
        flag = None
        if knob is None and name in by_name:
            knob, flag = by_name[name]
        if knob is None:
            found.others[name] = value
        elif flag is not None and name == flag.off and isinstance(value, bool):
            found.fixed[knob.name] = not value
        else:
            found.fixed[knob.name] = knob.parse(value, f"serve.engine_args.{key}")
    return found


def bare(flag: str) -> str:
    """Return a flag without leading dashes, words joined by dashes."""
    return flag.lstrip("-").replace("_", "-")


def arguments(knobs: Sequence[Knob], values: Mapping[str, KnobValue], version: str | None = None) -> tuple[str, ...]:
    """Return the command line of a candidate's knobs in a release of the engine."""
    return tuple(word for knob in knobs for word in knob.arguments(values.get(knob.name, knob.neutral), version))


def all_columns(columns: Columns, knobs: Sequence[Knob], fixed: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Return a column of each knob; if there is none, of the fixed or the neutral value."""
    like = next(iter(columns.values()), np.zeros(1))
    found = {}
    for knob in knobs:
        value = fixed.get(knob.name, knob.neutral)
        words = SHARES if knob.kind == "share" else knob.words
        code = words.index(value) + 1 if isinstance(value, str) else value or 0
        found[knob.name] = columns[knob.name] if knob.name in columns else np.full(like.shape, code)
    return found


def code(knob: Knob, word: str) -> int:
    """Return the code of a word in the columns of a knob."""
    return knob.words.index(word) + 1


def shares(codes: IntArray, otherwise: FloatArray | float) -> FloatArray:
    """Return the column of a share as numbers, `otherwise` if it is not set."""
    return np.where(codes > 0, codes / len(SHARES), otherwise)


def count(values: Mapping[str, KnobValue], knob: str) -> int:
    """Return the value of a knob that counts devices or groups of them; 1 if it is not set."""
    value = values.get(knob)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Return the powers of two from `first`, one of them, to `last`."""
    return tuple(first << step for step in range(max(0, last // first).bit_length()))


def divisors(task: Task) -> tuple[int, ...]:
    """Return the divisors of the number of devices in ascending order."""
    cards = Hardware.of(task).cards
    return tuple(each for each in range(1, cards + 1) if cards % each == 0)


def in_flight(task: Task, last: int, most: int = 1 << 30) -> tuple[int, ...]:
    """Return the `last` powers of two up to the requests in flight and `most`."""
    requests = max(1, most_in_flight(task.spec.serve.loads))
    return powers_of_two(1, min(most, 1 << (requests - 1).bit_length()))[-last:]


def by_hardware(
    cores: tuple[KnobValue, ...], devices: tuple[KnobValue, ...]
) -> Callable[[Task], tuple[KnobValue, ...]]:
    """Return what `auto` tries on CPU cores and on devices."""
    return lambda task: cores if Hardware.of(task).on_cores else devices


def _experts(task: Task) -> tuple[int, ...]:
    return divisors(task) if task.spec.model.num_moe_experts else (1,)


def _instances(task: Task) -> tuple[int, ...]:
    """More than one instance does not lower a latency."""
    return divisors(task) if is_rate(task.spec.objective) else (1,)


INSTANCES_KNOB = Knob(
    name=INSTANCES,
    help="Servers side by side, each with its own devices or CPU cores; a request goes to the least busy one.",
    neutral=1,
    auto=_instances,
    auto_help="divisors of the devices; 1 for a latency",
    aliases=("instance",),
)
SIZES_KNOB = SizesKnob(
    name=SIZES,
    help=f"Devices (or CPU cores) of each instance if they differ, such as 4+2+2; replaces {INSTANCES} and {TP}.",
    label="sizes",
    kind="word",
    auto=heterogeneous.worth_trying,
    auto_help="not set; for a rate also splits of all devices into unequal powers of two",
)
TP_KNOB = Knob(
    name=TP,
    help="Devices that split each layer's matrices.",
    label="TP",
    neutral=1,
    auto=divisors,
    auto_help="divisors of the devices",
)
PP_KNOB = Knob(
    name=PP,
    help="Pipeline stages: devices that hold successive layers.",
    label="PP",
    neutral=1,
    auto=divisors,
    auto_help="divisors of the devices",
)
DP_KNOB = Knob(
    name=DP,
    help="Attention data parallelism: groups inside one instance that each hold the attention of some sequences.",
    label="DP",
    neutral=1,
    auto=_experts,
    auto_help="1; with experts divisors of the devices",
)
EP_KNOB = Knob(
    name=EP,
    help="Devices that share the experts.",
    label="EP",
    neutral=1,
    auto=_experts,
    auto_help="1; with experts divisors of the devices",
)
CONTEXT_KNOB = Knob(
    name="context_len",
    help="Tokens of one sequence, prompt and answer.",
    auto=lambda task: (None,),
    auto_help="not set",
)
PREFIX_KNOB = Knob(
    name="enable_prefix_caching",
    help="Prompt prefixes that are in the cache are not computed again.",
    label="prefix caching",
    kind="flag",
    neutral=True,
    auto=lambda task: (True, False),
    auto_help="true, false",
)
EAGER_KNOB = Knob(
    name="enforce_eager",
    help="Eager mode: no graph capture and no compilation, for a faster start and slower serving.",
    label="eager",
    kind="flag",
    neutral=False,
    auto=lambda task: (False, True),
    auto_help="false, true",
    memory_order=-1,
)
KV_KNOB = Knob(name="kv_cache_type", help="Number format of cached keys and values.", label="KV cache", kind="word")


def with_flags(knob: Knob, *names: str, off: str = "") -> Knob:
    """Return a common knob with an engine's flags, the preferred spelling first."""
    return replace(knob, flags=tuple(Flag(name=name, off=off) for name in names or ("",)))
