"""The instances of candidates: their kinds, and the devices on which they run.

The instances of a candidate are all equal, or some only prefill and the others only decode. A text such as 2xtp2+1xtp4
describes the second case: two prefill instances with TP 2 and one decode instance with TP 4.

The terms are those of Dynamo's planners (ai-dynamo/aiconfigurator `README.md`): each kind of worker has its own
parallelism, and the rates of both kinds should match.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue, Rule
from flagcore.domain.spec import AUTO, Task, is_rate
from flagcore.errors import SpecError
from flagcore.i18n import Message
from flagcore_serving.load.routing import DECODE, PREFILL
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.weights import min_devices

KINDS = (PREFILL, DECODE)
SPLITS = {"tp": TP, "pp": PP, "dp": DP, "ep": EP}
PREFILL_LIMITS = ("max_num_batched_tokens", "chunked_prefill_size", "max_prefill_tokens")
DECODE_LIMITS = ("max_num_seqs", "max_running_requests", "cudagraph_mode", "speculation", "speculative_tokens")
"""Knobs that affect only prefill instances, or only decode instances. For the other kind, the engine's defaults apply.
"""
TRANSFER = "kv_transfer"
"""The knob for the way in which prefill and decode instances exchange caches."""
EXCHANGE, PREFILL_EXCHANGE = "all2all_backend", "prefill_all2all_backend"
"""The knobs for the exchange between experts: of all instances, and of those that prefill if it differs there."""
COPIES = ("redundant_experts", "enable_eplb")
"""Knobs that affect only instances with expert parallelism."""
ANSWER_COST = 2.5
"""Time of a device for a token of an answer, relative to a token of a prompt. It only selects divisions of devices.
Published node rates of DeepSeek on three chips have ratios of 2.3, 2.4 and 2.9 (lmsys.org, 2025-05-05, 2025-06-16 and
2025-09-26)."""
MAX_COUNTS = 12
"""Maximum number of divisions of the devices between two layouts that `auto` tries. A choice: then, neighboring
divisions differ by less than a tenth of the devices."""
MAX_WIDE_PREFILL = 64
"""Maximum number of devices of a prefill instance in wide expert parallelism. Published instances have 32."""
_KIND = re.compile(r"(\d{1,6})x(?=[tpde])(?:tp(\d{1,6}))?(?:pp(\d{1,6}))?(?:dp(\d{1,6}))?(?:ep(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Role:
    """The instances of one kind: their number, and the parallel sizes of each."""

    count: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        """The number of devices of one instance."""
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> dict[str, int]:
        return {knob: getattr(self, name) for name, knob in SPLITS.items()}

    def __str__(self) -> str:
        others = "".join(f"{name}{size}" for name in ("pp", "dp", "ep") if (size := getattr(self, name)) > 1)
        return f"{self.count}xtp{self.tp}{others}"


Pair: TypeAlias = tuple[Role, Role]
"""The instances that prefill, and those that decode."""
Check: TypeAlias = Callable[[Pair], bool]


@lru_cache(maxsize=1 << 16)
def roles(word: str) -> Pair:
    """Parse a value of PREFILL_DECODE. Return its two roles: prefill and decode. Raises ValueError if it is invalid."""
    matches = [_KIND.fullmatch(part) for part in word.lower().replace(" ", "").split("+")]
    if len(matches) != 2 or not (matches[0] and matches[1]):
        raise ValueError(word)
    prefill, decode = (Role(*(int(size or 1) for size in each.groups())) for each in matches if each)
    if min(*(getattr(each, name) for each in (prefill, decode) for name in ("count", *SPLITS))) < 1:
        raise ValueError(word)
    return prefill, decode


def parse_roles(value: object, key: str) -> str:
    """Return a value of PREFILL_DECODE in its shortest form. Raises SpecError, which names `key`, if it is invalid."""
    try:
        return "+".join(map(str, roles(value if isinstance(value, str) else "")))
    except ValueError:
        fix = "list the number and the layout of the instances that prefill and of those that decode: 2xtp2+1xtp4"
        raise SpecError(key=key, value=value, problem="is not a valid value", fix=fix) from None


def known_roles(task: Task) -> tuple[str, ...]:
    """Return all values of PREFILL_DECODE for a task, in the order of their codes.

    The values of `auto` come first, unless the space lists only others, then the values in the spec.
    """
    listed, spec_values = task.spec.space.get(PREFILL_DECODE, AUTO), list[str]()
    for section, values in (("space", task.spec.space), ("baseline", task.spec.baseline or {})):
        value = values.get(PREFILL_DECODE)
        texts = value if isinstance(value, tuple) else (value,)
        key = f"auto_tuner.{section}.{PREFILL_DECODE}"
        spec_values += [parse_roles(each, key) for each in texts if each not in (None, "auto")]
    has_auto = task.spec.serve.default_space or AUTO in (listed if isinstance(listed, tuple) else (listed,))
    return tuple(dict.fromkeys((*(_divisions(task) if has_auto else ()), *spec_values)))


def auto_roles(task: Task) -> tuple[KnobValue, ...]:
    """Return the values of `auto` for PREFILL_DECODE.

    They are None (not set) and, if the objective is a rate, the ways to divide all devices into prefill and decode
    instances.
    """
    return (None, *(_divisions(task) if is_rate(task.spec.objective) else ()))


def balanced_roles(task: Task) -> tuple[KnobValue, ...]:
    """Return the values of PREFILL_DECODE that a spec without a space searches.

    They are None (not set) and, for a rate of a model with experts on several hosts, some values of `auto`: for each
    layout of the prefill instances, with one and with several decode instances, the value whose share of devices for
    decoding is closest to the share of the work (see `ANSWER_COST`). Decode instances have attention DP groups.
    """
    cards, smallest, loads = Hardware.of(task).cards, min_devices(task), task.spec.serve.loads
    if Hardware.of(task).hosts == 1 or task.spec.model.num_moe_experts is None:
        return (None,)
    answers = ANSWER_COST * sum(load.output_len for load in loads)
    share = answers / (answers + sum(load.input_len for load in loads))
    pairs = [(*roles(str(word)), word) for word in auto_roles(task)[1:]]
    pairs.sort(key=lambda pair: abs(pair[1].count * pair[1].devices / cards - share))
    closest: dict[tuple[Role, bool], KnobValue] = {}
    for prefill, decode, word in pairs:
        if decode.dp > 1 and min(prefill.devices, decode.devices) >= smallest:
            closest.setdefault((replace(prefill, count=1), decode.count > 1), word)
    return (None, *closest.values())


def _divisions(task: Task) -> tuple[str, ...]:
    hardware = Hardware.of(task)
    has_experts = task.spec.model.num_moe_experts is not None
    return _all_divisions(hardware.cards, hardware.per_host, hardware.on_cores, has_experts, min_devices(task))


@lru_cache(maxsize=16)
def _all_divisions(cards: int, per_host: int, on_cores: bool, has_experts: bool, smallest: int) -> tuple[str, ...]:
    """Return the ways to divide `cards` devices into prefill and decode instances without room for another instance.

    The size of an instance is a power of two and at least half of `smallest`. An instance spans hosts only if it does
    not fit on one. If the model has experts, an instance may also split them, with tensor parallelism or with one
    attention DP group per device.
    """
    widths = [1 << step for step in range(cards.bit_length()) if 1 << step < cards]
    usual = [each for each in widths if smallest <= 2 * each and each <= max(per_host, smallest)]
    layouts = [Role(1)] if on_cores else [Role(1, width) for width in usual]
    if has_experts and not on_cores:
        layouts += [Role(1, width, ep=width) for width in usual if width > 1]
        layouts += [Role(1, dp=width, ep=width) for width in usual if width > 1]
    divisions = list[str]()
    for first in layouts:
        for second in layouts:
            counts = range(1, (cards - second.devices) // first.devices + 1)
            for number in counts if len(counts) <= MAX_COUNTS else _spread(counts):
                second_count = (cards - number * first.devices) // second.devices
                unused_devices = cards - number * first.devices - second_count * second.devices
                if second_count and unused_devices < min(first.devices, second.devices):
                    divisions.append(f"{number}x{str(first)[2:]}+{second_count}x{str(second)[2:]}")
    return tuple(
        dict.fromkeys([*divisions, *(_wide_divisions(cards, per_host) if has_experts and not on_cores else ())])
    )


def _wide_divisions(cards: int, per_host: int) -> list[str]:
    """Return the ways to divide `cards` devices into prefill and decode instances with wide expert parallelism.

    Prefill instances span several hosts, and one decode instance spans all other hosts. All instances have one
    attention DP group per device.
    """
    widths = [per_host << step for step in range(1, cards.bit_length()) if per_host << step <= MAX_WIDE_PREFILL]
    pairs = [(width, number) for width in widths for number in range(1, cards // width + 1)]
    divisions = list[str]()
    for width, number in pairs:
        decode_devices = (cards - number * width) // per_host * per_host
        if decode_devices > per_host:
            divisions.append(f"{number}xtp1dp{width}ep{width}+1xtp1dp{decode_devices}ep{decode_devices}")
    return divisions


def _spread(counts: range) -> list[int]:
    """Return at most `MAX_COUNTS` evenly spaced numbers in the range `counts`."""
    return sorted({int(each) for each in np.linspace(counts[0], counts[-1], MAX_COUNTS).round()})


def rules(task: Task, layout_rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules for PREFILL_DECODE: both kinds must fit on the devices, and each must obey `layout_rules`."""
    hardware = Hardware.of(task)

    def too_many(pair: Pair) -> bool:
        return sum(each.count * each.devices for each in pair) > hardware.cards

    def misplaced(pair: Pair) -> bool:
        return not too_many(pair) and not _fits(pair, hardware)

    def rule(name: str, check: Check, message: str) -> Rule:
        table = broken_by_code(task, check)
        return Rule(name=name, knobs=(PREFILL_DECODE,), message=message, broken=lambda c: table[c[PREFILL_DECODE]])

    def of_kinds(rule: Rule) -> Rule:
        own, message = (
            of_each_kind(task, rule),
            Message("in {knob}, {message}", knob=PREFILL_DECODE, message=rule.message),
        )
        name = f"{rule.name}_of_kinds"
        return replace(own, name=name, message=message, broken=lambda c: (c[PREFILL_DECODE] > 0) & own.broken(c))

    cards = Message(
        "both kinds of {knob} must not exceed the {cards} devices", knob=PREFILL_DECODE, cards=hardware.cards
    )
    hosts = Message(
        "each instance of {knob} must fit on a host, or use all devices of several hosts", knob=PREFILL_DECODE
    )
    return (
        rule("cards_of_kinds", too_many, cards),
        rule("hosts_of_kinds", misplaced, hosts),
        *(of_kinds(each) for each in layout_rules if set(each.knobs) <= set(SPLITS.values())),
    )


def of_each_kind(task: Task, rule: Rule, *, one_suffices: bool = False) -> Rule:
    """Return a rule that applies the layout rule `rule` also to the prefill and decode instances of PREFILL_DECODE.

    Both kinds must obey the rule, or only one of them if `one_suffices`.
    """
    tables, exchanges = _sizes(known_roles(task)), EXCHANGE in rule.knobs

    def broken(c: Columns) -> BoolArray:
        codes = c[PREFILL_DECODE]
        kinds = [{**c, **{knob: table[codes] for knob, table in each.items()}} for each in tables]
        if exchanges:
            kinds[0][EXCHANGE] = np.where(c[PREFILL_EXCHANGE] > 0, c[PREFILL_EXCHANGE], c[EXCHANGE])
        of_kinds = (np.all if one_suffices else np.any)([rule.broken(columns) for columns in kinds], axis=0)
        return np.where(codes > 0, of_kinds, rule.broken(c) if set(rule.knobs) <= set(c) else False)

    knobs = (*rule.knobs, PREFILL_DECODE, *((PREFILL_EXCHANGE,) if exchanges else ()))
    return Rule(name=rule.name, knobs=knobs, message=rule.message, broken=broken)


@lru_cache
def _sizes(words: tuple[str, ...]) -> list[dict[str, IntArray]]:
    """Return the sizes of the prefill and decode instances by the code of PREFILL_DECODE, of which `words` are the
    values. They are 1 if it is not set."""
    layouts = [[each.layout for each in roles(word)] for word in words]
    return [
        {knob: np.array([1, *(pair[kind][knob] for pair in layouts)]) for knob in SPLITS.values()}
        for kind in range(len(KINDS))
    ]


@lru_cache(maxsize=1 << 16)
def _fits(pair: Pair, hardware: Hardware) -> bool:
    return _places([each.devices for each in pair for _ in range(each.count)], hardware) is not None


def exchanging(task: Task, c: Columns) -> tuple[BoolArray, BoolArray]:
    """Return which candidates have instances that prefill, and other instances, whose attention groups exchange tokens
    with experts on several hosts: all their devices share the experts."""

    codes, tables = c[PREFILL_DECODE], _sizes(known_roles(task))
    masks = list[BoolArray]()
    for sizes in (*({knob: table[codes] for knob, table in each.items()} for each in tables), c):
        ranks = sizes[TP] * sizes[DP]
        masks.append((sizes[DP] > 1) & (sizes[EP] == ranks) & (ranks > Hardware.of(task).per_host))
    return masks[0], np.where(codes > 0, masks[1], masks[2])


def broken_by_code(task: Task, check: Check) -> BoolArray:
    """Return the result of `check` for each value of PREFILL_DECODE, indexed by code; False for code 0 (not set)."""
    return np.array([False, *(check(roles(word)) for word in known_roles(task))])


def _places(parts: Sequence[int], hardware: Hardware) -> list[tuple[range, int, int]] | None:
    """Return the hosts, the first device and the number of devices of each instance, or None if they do not fit.

    `parts`: the number of devices of each instance. CPU cores are divided evenly instead. Large instances are placed
    first, each on the first host with room for it or, if it is larger than a host, on whole hosts.
    """
    if hardware.on_cores:
        parts = [int(hardware.share(np.array([len(parts)]))[0])] * len(parts)
    order = sorted(range(len(parts)), key=lambda index: -parts[index])
    per_host = hardware.per_host if hardware.hosts > 1 else sum(parts)
    used, place_of = [0] * hardware.hosts, dict[int, tuple[range, int, int]]()
    for index in order:
        span, on_host = max(1, parts[index] // per_host), min(parts[index], per_host)
        starts = range(hardware.hosts - span + 1)
        first = next((first for first in starts if max(used[first : first + span]) + on_host <= per_host), None)
        if first is None or on_host * span != parts[index]:
            return None
        place_of[index] = (range(first, first + span), used[first], parts[index])
        used[first : first + span] = [used[first] + on_host] * span
    return [place_of[index] for index in range(len(parts))]


def of_kind(values: Mapping[str, KnobValue], kind: str) -> dict[str, KnobValue]:
    """Return the knob values of the prefill or decode instances (`kind`), without limits for the other kind."""
    pair = roles(str(values[PREFILL_DECODE]))
    layout = pair[KINDS.index(kind)].layout
    unused = (*(DECODE_LIMITS if kind == PREFILL else PREFILL_LIMITS), *(COPIES if layout[EP] == 1 else ()))
    kind_values = {name: value for name, value in values.items() if name not in (*unused, PREFILL_EXCHANGE)}
    if kind == PREFILL and values.get(PREFILL_EXCHANGE):
        kind_values[EXCHANGE] = values[PREFILL_EXCHANGE]
    return {**kind_values, PREFILL_DECODE: None, INSTANCES: sum(each.count for each in pair), **layout}


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance of a candidate: its knob values, and the index `first` of its `width` devices.

    An instance on several `hosts` uses all their devices. `kind`: PREFILL or DECODE if the instance does only this,
    else empty.
    """

    values: Mapping[str, KnobValue]
    first: int
    width: int
    hosts: range = range(1)
    kind: str = ""


def placements(task: Task, values: Mapping[str, KnobValue]) -> tuple[Placement, ...]:
    """Return the instances of a legal candidate, each on consecutive devices. Instances that prefill come first."""
    pair = values.get(PREFILL_DECODE)
    if isinstance(pair, str):
        values_by_kind: dict[str, Mapping[str, KnobValue]] = {kind: of_kind(values, kind) for kind in KINDS}
        parts = [(each.devices, kind) for kind, each in zip(KINDS, roles(pair), strict=True) for _ in range(each.count)]
    else:
        values_by_kind = {"": values}
        ranks = count(values, TP) * count(values, PP) * count(values, DP)
        parts = [(ranks, "")] * count(values, INSTANCES)
    places = _places([devices for devices, _ in parts], Hardware.of(task))
    assert places is not None, "the candidate is legal"
    return tuple(
        Placement(values_by_kind[kind], first, width, hosts, kind)
        for (_, kind), (hosts, first, width) in zip(parts, places, strict=True)
    )


@dataclass(frozen=True, slots=True)
class InstanceKinds:
    """The kinds of instances of some candidates, one array element per kind, sorted by candidate.

    - `owner`: the index of the candidate.
    - `count`: the number of its instances of this kind, among which requests are divided.
    - `columns`: the knob values of each kind.
    - `role`: 1 for instances that only prefill, which come first, 2 for instances that only decode, 0 for others.
    """

    owner: IntArray
    count: IntArray
    columns: Columns
    role: IntArray

    @property
    def size(self) -> int:
        return int(self.owner[-1]) + 1 if self.owner.size else 0

    @property
    def first_rows(self) -> IntArray:
        """The row of each candidate's first kind."""
        return np.searchsorted(self.owner, np.arange(self.size))

    @property
    def members(self) -> list[range]:
        return [range(*edges) for edges in pairwise([*self.first_rows.tolist(), self.owner.size])]

    def total(self, values: FloatArray | IntArray) -> FloatArray:
        """Return the sum of `values`, given per instance, over the instances of each candidate."""
        return np.bincount(self.owner, weights=self.count * values, minlength=self.size).astype(np.float64)

    def worst(self, values: FloatArray) -> IntArray:
        """Return the row of the kind with the largest of `values`, for each candidate."""
        order = np.lexsort((values, self.owner))
        return order[np.searchsorted(self.owner, np.arange(self.size), side="right") - 1]


def uniform_kinds(instances: IntArray) -> InstanceKinds:
    """Return the kinds of candidates whose instances are all equal: one kind per candidate, without knob values."""
    owner = np.arange(instances.size, dtype=np.int64)
    return InstanceKinds(owner, np.maximum(instances, 1), {}, np.zeros_like(owner))


def instance_kinds(task: Task, columns: Columns) -> InstanceKinds:
    """Return the kinds of instances of each candidate: two if PREFILL_DECODE is set, else one."""
    size = next(iter(columns.values())).size
    codes = np.broadcast_to(columns.get(PREFILL_DECODE, np.zeros(1, dtype=np.int64)), size)
    if not codes.any():
        return replace(uniform_kinds(columns.get(INSTANCES, np.ones(size, dtype=np.int64))), columns=columns)
    owner = np.repeat(np.arange(size), np.where(codes > 0, 2, 1))
    is_second = np.append(False, owner[1:] == owner[:-1])
    role = np.where(codes[owner] > 0, 1 + is_second, 0)
    pairs, pair_of_row = [roles(word) for word in known_roles(task)], codes[owner] - 1
    kind_columns = {knob: column[owner] for knob, column in columns.items()}
    number = np.maximum(kind_columns[INSTANCES], 1)
    for place, other_limits in enumerate((DECODE_LIMITS, PREFILL_LIMITS)):
        values = {knob: [pair[place].layout[knob] for pair in pairs] for knob in SPLITS.values()}
        values |= {knob: [0] * len(pairs) for knob in (PREFILL_DECODE, *other_limits)}
        values[INSTANCES] = [sum(each.count for each in pair) for pair in pairs]
        for knob in values.keys() & kind_columns.keys():
            of_kind = np.array(values[knob])[pair_of_row]
            kind_columns[knob] = np.where(role == place + 1, of_kind, kind_columns[knob])
        counts = np.array([pair[place].count for pair in pairs])
        number = np.where(role == place + 1, counts[pair_of_row], number)
    if PREFILL_EXCHANGE in kind_columns:
        own = kind_columns.pop(PREFILL_EXCHANGE)
        kind_columns[EXCHANGE] = np.where((role == 1) & (own > 0), own, kind_columns[EXCHANGE])
    for knob in kind_columns.keys() & {*COPIES}:
        kind_columns[knob] = np.where((role > 0) & (kind_columns[EP] == 1), 0, kind_columns[knob])
    return InstanceKinds(owner, number, kind_columns, role)
