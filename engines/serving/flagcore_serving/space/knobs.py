"""The common knobs of serving engines, and the parser of knob values in specs and job records.

Also flags of a server: their spellings in commands, and which of them a program has.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flagcore_importers.programs import strip_dashes
from flagcore_models.layers import attention_counts
from flagcore_models.mixers.latent_attention import LatentAttention

from flagcore.domain.knob import SHARES, Flag, Knob
from flagcore.domain.space import Axis, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import AUTO, Task, is_rate
from flagcore.errors import SpecError
from flagcore.i18n import closest
from flagcore.spec.plain_data import package_yaml
from flagcore_serving.job import EngineArg
from flagcore_serving.space import placement
from flagcore_serving.space.hardware import (
    DP,
    EP,
    INSTANCES,
    PP,
    PREFILL_DECODE,
    TP,
    Hardware,
    max_in_flight,
    most_images,
)
from flagcore_serving.space.roles import auto_roles, balanced_roles, known_roles, parse_roles
from flagcore_serving.space.weights import min_devices

LAYOUT = (INSTANCES, TP, PP, DP, EP)
SHARING = "decode_context_parallel_size"
SLOTS, RANK = "max_loras", "max_lora_rank"
DEFAULT_SPACE = (*LAYOUT, SHARING, "max_num_seqs", "max_num_batched_tokens", SLOTS)
"""Names or aliases of the knobs that a spec without a space searches: layouts and limits of the batch."""
CONTEXT = "context_len"
"""The knob for the context length. A spec without a space sets it only if the engine would not start otherwise."""
IMPLIED_VALUES: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys((INSTANCES, TP, PP, DP, EP), (None, 1)),
    **dict.fromkeys((PREFILL_DECODE, "max_num_seqs", "max_num_batched_tokens", "block_size"), (None,)),
    "enforce_eager": (None, False),
}
"""Knobs that any job record may contain. An engine without such a knob accepts only these values, which mean no
change."""


def axes(
    task: Task, knobs: Sequence[Knob], fixed: Mapping[str, KnobValue], version: str | None = None
) -> tuple[Axis, ...]:
    """Return the axis of each knob: its values in the spec's space, or else its fixed or neutral value.

    `fixed`: values that `engine_args` set. If a spec has no space, the knobs of DEFAULT_SPACE and CONTEXT are `auto`
    unless they are fixed. Raises SpecError for a key of the space or the baseline that is not a knob, and for a value
    of a knob that the engine release `version` does not support.
    """
    baseline = task.spec.baseline or {}
    for values, section in ((task.spec.space, "space"), (baseline, "baseline")):
        _knobs_by_key(values, knobs, task.spec.serve.engine, f"auto_tuner.{section}.")
    result, wide = [], wide_values(task, fixed)
    for knob in knobs:
        if knob.name == PREFILL_DECODE:
            knob = replace(knob, words=known_roles(task))
        value = fixed.get(knob.name, knob.neutral)
        extra_values, baseline_value = [value, knob.neutral], knob.value_in(baseline)
        if knob.name in (EXCHANGE, PREFILL_EXCHANGE) and knob.is_available(version):
            extra_values += knob.words  # see `rules.exchange_merge`
        if baseline_value is not None:
            extra_values.append(knob.parse(baseline_value, f"auto_tuner.baseline.{knob.name}"))
        searched = _searched(task, knob, fixed, wide, version)
        set_value = next((each for each in (*searched, *extra_values) if each != knob.neutral), None)
        if set_value is not None and not knob.is_available(version):
            section = "serve.engine_args" if knob.value_in(baseline) is None else "auto_tuner.baseline"
            key = f"{'auto_tuner.space' if set_value in searched and knob.name not in fixed else section}.{knob.name}"
            releases = f"{task.spec.serve.engine} {knob.versions}"
            problem, fix = f"needs {releases}, but the release is {version}", f"remove it, or use {releases}"
            raise SpecError(key=key, value=set_value, problem=problem, fix=fix)
        result.append(knob.axis(searched, extra_values))
    return tuple(result)


def _searched(
    task: Task,
    knob: Knob,
    fixed: Mapping[str, KnobValue],
    wide: Mapping[str, tuple[KnobValue, ...]],
    version: str | None,
) -> Sequence[KnobValue]:
    """Return the values of a knob that are tried, of those that it may have: see `axes` and `wide_values`."""
    by_default = task.spec.serve.default_space and any(name in (*DEFAULT_SPACE, CONTEXT) for name in knob.names)
    by_default |= knob.name == INSTANCES and PREFILL_DECODE in task.spec.space  # both are divisions of all devices
    if not knob.is_available(version) and AUTO in (knob.value_in(task.spec.space), by_default and AUTO):
        return (knob.neutral,)
    if knob.name in wide and knob.is_available(version):
        return wide[knob.name]
    usual = AUTO if by_default and knob.name not in fixed else [fixed.get(knob.name, knob.neutral)]
    return task.listed_values(knob, usual)


def wide_values(task: Task, fixed: Mapping[str, KnobValue]) -> dict[str, tuple[KnobValue, ...]]:
    """Return the values that a spec without a space searches to serve experts on several hosts, by knob.

    These are values of PREFILL_DECODE, and settings of published recipes. The result is empty if there is nothing to
    search, or if the baseline or `fixed` sets one of these knobs.
    """
    copies = (None, task.spec.model.experts // 8)
    recipe: dict[str, tuple[KnobValue, ...]] = {REDUNDANT: copies, BALANCING: (False, True)}
    recipe["mem_fraction_static"] = (None, RECIPE_SHARE)
    is_set = {PREFILL_DECODE, *recipe} & {*fixed, *(task.spec.baseline or {})}
    pairs = balanced_roles(task) if task.spec.serve.default_space and not is_set else ()
    return {PREFILL_DECODE: pairs, **recipe} if len(pairs) > 1 else {}


def parse(values: Mapping[str, object], knobs: Sequence[Knob], engine: str) -> dict[str, KnobValue]:
    """Parse the knob values of a spec or a job record. Raises SpecError for an unknown knob or an invalid value."""
    knobs_by_key = _knobs_by_key(values, knobs, engine, "")
    return {knob.name: knob.parse(values[key], key) for key, knob in knobs_by_key.items()}


def _knobs_by_key(values: Mapping[str, object], knobs: Sequence[Knob], engine: str, prefix: str) -> dict[str, Knob]:
    """Return the knob of each key in `values`. Raises SpecError for an unknown key, and for two keys of one knob."""
    by_name = {name: knob for knob in knobs for name in knob.names}
    result: dict[str, Knob] = {}
    for key, value in values.items():
        knob = by_name.get(key)
        if knob is None:
            if value in IMPLIED_VALUES.get(key, ()):
                continue
            names = [knob.name for knob in knobs]
            close_matches = get_close_matches(str(key), names, n=1, cutoff=0.5)
            fix = f"did you mean {close_matches[0]}?" if close_matches else f"its knobs: {', '.join(names)}"
            raise SpecError(key=f"{prefix}{key}", problem=f"is not a knob of {engine}", fix=fix)
        other = next((other for other, same in result.items() if same is knob), None)
        if other is not None:
            raise SpecError(key=f"{prefix}{key}", problem=f"is the same knob as {other}", fix="remove one of the two")
        result[key] = knob
    return result


def arguments(knobs: Sequence[Knob], values: Mapping[str, KnobValue], version: str | None = None) -> tuple[str, ...]:
    """Return the command-line arguments that set a candidate's knobs in the engine release `version`."""
    return tuple(word for knob in knobs for word in knob.arguments(values.get(knob.name, knob.neutral), version))


def code(knob: Knob, value: KnobValue) -> int:
    """Return the code of a knob's value: the integer that represents it in candidate columns."""
    words = SHARES if knob.kind == "share" else knob.words
    return words.index(value) + 1 if isinstance(value, str) else value or 0


def or_default(codes: IntArray, default: IntArray | int) -> IntArray:
    """Return the values of a numeric knob's column `codes`, with `default` where the knob is not set."""
    return np.where(codes > 0, codes, default)


def shares(codes: IntArray, default: FloatArray | float) -> FloatArray:
    """Convert the column `codes` of a knob that is a share to numbers in (0, 1], with `default` where it is not set."""
    return np.where(codes > 0, codes / len(SHARES), default)


def divisors(task: Task) -> tuple[int, ...]:
    """Return the divisors of the number of devices in ascending order."""
    cards = Hardware.of(task).cards
    return tuple(each for each in range(1, cards + 1) if cards % each == 0)


def tensor_sizes(task: Task) -> tuple[int, ...]:
    """Return the divisors of the device count, and the powers of two up to this count, in ascending order.

    Other sizes rarely divide the attention heads: a model may run on 8 of 12 devices, but not on 6 or 12. Sizes above
    the number of linked devices are left out, unless the weights need more devices of a host.
    """
    hardware = Hardware.of(task)
    cards, most = hardware.cards, max(task.cluster.linked_devices, min(min_devices(task), hardware.per_host))
    sizes = {*divisors(task), *(1 << step for step in range(cards.bit_length()))}
    return tuple(sorted(size for size in sizes if size <= most))


def powers_in_flight(task: Task, count: int, maximum: int = 1 << 30) -> tuple[int, ...]:
    """Return the `count` largest powers of two up to `maximum` and to the number of requests in flight, rounded up."""
    limit = min(maximum, 1 << (max(1, max_in_flight(task.spec.serve.loads)) - 1).bit_length())
    return tuple(1 << step for step in range(limit.bit_length()))[-count:]


def slot_counts(task: Task) -> tuple[int | None, ...]:
    """Return powers of two up to the number of adapters, rounded up, or None without adapters."""
    number = task.spec.serve.loads[0].adapters
    return tuple(1 << step for step in range((number - 1).bit_length() + 1)) if number else (None,)


def shares_cache(task: Task) -> bool:
    """Return whether tensor ranks have copies of one cache, which they may share: that of dense latent attention."""
    kinds = attention_counts(task.spec.model)
    return any(isinstance(each, LatentAttention) for each in kinds) and not any(each.indexer for each in kinds)


class Auto(NamedTuple):
    """The meaning of `auto` for a knob: a function that returns the values for a task, and a description of them."""

    values: Callable[[Task], Sequence[KnobValue]]
    help: str


def fixed_values(*values: KnobValue) -> Auto:
    """Return an `auto` with the same values for every task."""
    texts = (
        str(each).lower() if isinstance(each, bool) else "not set" if each is None else str(each) for each in values
    )
    return Auto(lambda task: values, ", ".join(texts))


def by_hardware(cores: Auto, devices: Auto) -> Auto:
    """Return an `auto` with different values on CPU cores and on devices."""
    return Auto(
        lambda task: (cores if Hardware.of(task).on_cores else devices).values(task),
        f"{devices.help}; on cores {cores.help}",
    )


def if_fp8(default: str, fp8: str) -> Auto:
    """Return an `auto` for cache formats: `default`, and `fp8` if the chip supports it."""
    help_text = f"{default}, and {fp8} if the chip supports it"
    return Auto(lambda task: (default, fp8) if Hardware.of(task).fp8 else (default,), help_text)


class RolesKnob(Knob):
    """The knob PREFILL_DECODE. Its values are texts such as 2xtp2+1xtp4, and the valid ones depend on the task."""

    def parse(self, value: object, key: str) -> KnobValue:
        return None if value is None else parse_roles(value, key)


ASYNC, BACKEND, SPECULATION, DRAFTED = "async_scheduling", "attention_backend", "speculation", "speculative_tokens"
MOE, QUANTIZATION = "moe_backend", "quantization"
KV, PREFIX, EAGER = "kv_cache_type", "enable_prefix_caching", "enforce_eager"
TRANSFER, TOWER = placement.TRANSFER, "mm_encoder_tp_mode"
EXCHANGE, PREFILL_EXCHANGE, OVERLAP = placement.EXCHANGE, placement.PREFILL_EXCHANGE, "two_batch_overlap"
REDUNDANT, BALANCING = placement.COPIES
RECIPE_SHARE = "0.84"
"""SGLang's share of memory in recipes for wide expert parallelism: 0.82 to 0.85 (lmsys.org, 2025-05-05;
ishandhanani/srt-slurm @f64d2b9f). Its default would leave no cache, because it grows with the prefill chunk."""
EXTENSIBLE = (BACKEND, MOE, QUANTIZATION, SPECULATION)
"""Knobs for which some builds of an engine register more values. `engine_args` may contain such values, a space may
not."""


def has_wide_experts(task: Task) -> bool:
    """Return whether the experts of a task's model may be on several hosts."""
    return bool(task.spec.model.experts) and Hardware.of(task).hosts > 1


AUTOS = {
    "roles": Auto(auto_roles, "not set; for a rate also divisions of all devices between two layouts"),
    "tensor_sizes": Auto(tensor_sizes, "divisors of the devices, and powers of two, within a host"),
    "divisors": Auto(divisors, "divisors of the devices"),
    "unset_and_divisors": Auto(lambda task: (None, *divisors(task)), "not set, and divisors of the devices"),
    "divisors_with_experts": Auto(
        lambda task: divisors(task) if task.spec.model.experts else (1,), "1; with experts divisors of the devices"
    ),
    "divisors_for_rates": Auto(  # several instances do not reduce a latency
        lambda task: divisors(task) if is_rate(task.spec.objective) else (1,),
        "divisors of the devices; 1 for a latency",
    ),
    "switch_between_hosts": Auto(
        lambda task: (False, True) if has_wide_experts(task) else (False,),
        "false; with experts on several hosts also true",
    ),
    "copies_between_hosts": Auto(
        lambda task: (
            (None, *(task.spec.model.experts // part for part in (8, 4))) if has_wide_experts(task) else (None,)
        ),
        "not set; on several hosts also an eighth and a quarter of the experts",
    ),
    "sharing_sizes": Auto(
        lambda task: (None, *tensor_sizes(task)[1:]) if shares_cache(task) else (None,),
        "not set; with latent attention also the sizes of tensor parallelism above 1",
    ),
    "powers_in_flight": Auto(
        lambda task: powers_in_flight(task, count=4), "four powers of two up to the requests in flight"
    ),
    "adapter_slots": Auto(slot_counts, "powers of two up to the adapters, rounded up; without adapters not set"),
    "tower_modes": Auto(
        lambda task: ("weights", "data") if task.spec.model.vision and most_images(task.spec.serve.loads) else (None,),
        "both for a load with images; else not set",
    ),
}
"""Meanings of `auto` that tables of knobs refer to by name."""


def read(rows: Mapping[str, Mapping[str, Any] | None], autos: Mapping[str, Auto] = AUTOS) -> tuple[Knob, ...]:
    """Return the knobs of a table that maps the name of each knob to its fields.

    A knob in COMMON needs only the fields that differ. These fields have a form of their own:

    - `flags`: names, or fields of `Flag`; by default the name of the knob with hyphens.
    - `off_flag`: the flag that sets False.
    - `auto`: a list of values, or a key of `autos`.
    - `on_cores`: what `auto` means if devices are CPU cores, in the same form as `auto`.
    - `any_case`: whether the engine reads its words in lower case, too.
    """
    return tuple(_knob(name, {**COMMON.get(name, {}), **(row or {})}, autos) for name, row in rows.items())


def _knob(name: str, row: dict[str, Any], autos: Mapping[str, Auto]) -> Knob:
    def auto_of(key: str) -> Auto:
        value = row.pop(key, [None])
        return autos[value] if isinstance(value, str) else fixed_values(*value)

    auto = by_hardware(auto_of("on_cores"), auto_of("auto")) if "on_cores" in row else auto_of("auto")
    if row.pop("any_case", False):
        row["spellings"] = {word.lower(): word for word in row["words"]}
    off, flags = row.pop("off_flag", ""), row.pop("flags", [name.replace("_", "-")])
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    fields = {"auto": auto.values, "auto_help": auto.help, **fields}
    fields["flags"] = tuple(Flag(name=each, off=off) if isinstance(each, str) else Flag(**each) for each in flags)
    return (RolesKnob if name == PREFILL_DECODE else Knob)(name=name, **fields)


COMMON: Mapping[str, Mapping[str, Any]] = package_yaml(__package__, "knobs.yaml")
"""The fields of the knobs that engines share, by name of the knob."""


LENGTHS = (
    *("max_model_len", "context_length", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_queued_tokens"),
    *("max_num_scheduled_tokens", "safetensors_prefetch_block_size", "max_total_tokens", "max_prefill_tokens"),
    *("ctx_size", "cuda_graph_prefill_max_context"),
)
"""Arguments whose value may have a unit, such as 32k. Sources: vLLM 0.32 and 0.33 `engine/arg_utils.py`, SGLang 0.5.23
`arg_groups/fields`."""


class FlagProblem(NamedTuple):
    """Why an engine may reject a flag, and what to do.

    - `removed`: whether earlier releases had the flag.
    - `is_certain`: False if the release is unknown, and may still have the flag.
    """

    problem: str
    fix: str
    removed: bool = False
    is_certain: bool = True


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values of a JSON object, or of a list with a single one, by their path with dots, or else `value`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0]
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves(f"{name}.{key}", each)
    else:
        yield name, value


def forms(name: str) -> set[str]:
    """Return a flag, and the flag without its negation and without a key after a dot."""
    return {name, name.split(".")[0], name.removeprefix("no-").split(".")[0]}


@lru_cache(maxsize=4096)
def similar(name: str, flags: frozenset[str]) -> str:
    """Return the one of `flags` that `name` abbreviates, or else the most similar one; empty if there is none."""
    longer = [flag for flag in flags if len(name) > 3 and flag.startswith(name)]
    return longer[0] if len(longer) == 1 else closest(name, sorted(flags), cutoff=0.85)


_LITERAL_PATTERN = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")
_FIELD_PATTERN = re.compile(r"^ {4}([a-z]\w*)\s*: .*[^,\s]$", re.MULTILINE)
_MAX_BYTES = 8 << 20


@lru_cache(maxsize=16)
def flags_in_source(folders: tuple[str, ...], files: tuple[str, ...], fields: tuple[str, ...]) -> frozenset[str]:
    """Extract the flags from an engine's source files, without importing or running it. Missing files are ignored."""
    flags: set[str] = set()
    for folder in folders:
        for names, pattern in ((files, _LITERAL_PATTERN), (fields, _FIELD_PATTERN)):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and path.stat().st_size < _MAX_BYTES:
                    flags |= {strip_dashes(word) for word in pattern.findall(path.read_text("utf-8", errors="replace"))}
        if flags:
            break
    return frozenset(flags)


def as_words(args: Mapping[str, EngineArg], *, has_negation: bool) -> list[str]:
    """Return flags and their values as command-line words.

    True gives the bare flag. False gives `--no-` with the flag if `has_negation`, else nothing. None gives nothing.
    """
    words: list[str] = []
    for name, value in args.items():
        dashes = "-" if len(name) == 1 else "--"
        if value is None:
            continue
        if isinstance(value, bool):
            words += [dashes + name] if value else [f"--no-{name}"] if has_negation else []
        else:
            words += [dashes + name, *map(str, value if isinstance(value, list) else [value])]
    return words


def parse_length(value: Any, units: Mapping[str, int]) -> Any:
    """Convert a number with a unit, such as `1.5k`, to a whole number. Return other values unchanged.

    `units`: the factors of units (`Program.units`). Those that are powers of two have no decimals.
    """
    match = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?([a-zA-Z]{1,2})", value.strip()) if isinstance(value, str) else None
    if not match or match[3] not in units or (match[2] and units[match[3]] % 1000):
        return value
    return int(Decimal(f"{match[1]}.{match[2] or 0}") * units[match[3]])
