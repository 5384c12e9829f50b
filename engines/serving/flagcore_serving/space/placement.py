"""The instances of candidates: their kinds, and the devices on which they run.

The instances of a candidate are all equal, or some only prefill and the others only decode. A text such as 2xtp2+1xtp4
describes the second case: two prefill instances with TP 2 and one decode instance with TP 4. Instances that only encode
images may come first: 1xenc+2xtp2+1xtp4, or 1xenc+2xtp2, where the others prefill and decode. They have one device.

The terms are those of Dynamo's planners (ai-dynamo/aiconfigurator `README.md`): each kind of worker has its own
parallelism, and the rates of both kinds should match.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from flagcore.domain.knob import in_versions
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import Message
from flagcore_serving.load.routing import DECODE, ENCODE, PREFILL
from flagcore_serving.space.hardware import DP, EP, INSTANCES, PP, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.roles import KINDS, SPLITS, Role, Roles, fits, known_roles, language, places, roles

ENCODES = KINDS.index(ENCODE)
PREFILL_LIMITS = ("max_num_batched_tokens", "chunked_prefill_size", "max_prefill_tokens")
DECODE_LIMITS = ("max_num_seqs", "max_running_requests", "cudagraph_mode", "speculation", "speculative_tokens")
"""Knobs that affect only prefill instances, or only decode instances. For the other kind, the engine's defaults apply.
"""
TRANSFER = "kv_transfer"
"""The knob for the way in which prefill and decode instances exchange caches."""
EXCHANGE, PREFILL_EXCHANGE = "all2all_backend", "prefill_all2all_backend"
ROLE = "instance_role"  # the column of `InstanceKinds.role`
"""The knobs for the exchange between experts: of all instances, and of those that prefill if it differs there."""
COPIES = ("redundant_experts", "enable_eplb")
"""Knobs that affect only instances with expert parallelism."""


Check: TypeAlias = Callable[[Roles], bool]


def rules(task: Task, layout_rules: Sequence[Rule], *, version: str, encoders: str) -> tuple[Rule, ...]:
    """Return the rules for PREFILL_DECODE: all kinds must fit on the devices, and each must obey `layout_rules`.

    `version`: the engine's release. `encoders`: a specifier of the releases that encode images apart."""
    hardware = Hardware.of(task)

    def too_many(parts: Roles) -> bool:
        return sum(each.count * each.devices for each in parts) > hardware.cards

    def misplaced(parts: Roles) -> bool:
        return not too_many(parts) and not fits(parts, hardware)

    def unencoded(parts: Roles) -> bool:
        return parts[-1].kind == ENCODE and not in_versions(encoders, version)

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

    names = {"knob": PREFILL_DECODE, "engine": task.spec.work.engine, "releases": encoders}
    cards = Message(
        "all kinds of {knob} must not exceed the {cards} devices", knob=PREFILL_DECODE, cards=hardware.cards
    )
    hosts = Message(
        "each instance of {knob} must fit on a host, or use all devices of several hosts", knob=PREFILL_DECODE
    )
    return (
        rule("cards_of_kinds", too_many, cards),
        rule("hosts_of_kinds", misplaced, hosts),
        rule("encoders_of_kinds", unencoded, Message("enc in {knob} needs {engine} {releases}", **names)),
        *(of_kinds(each) for each in layout_rules if set(each.knobs) <= set(SPLITS.values())),
    )


def of_each_kind(task: Task, rule: Rule, *, one_suffices: bool = False) -> Rule:
    """Return a rule that applies the layout rule `rule` also to the language models of PREFILL_DECODE.

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
    """Return the sizes of the first and the last kind of instance with the language model, by the code of
    PREFILL_DECODE, of which `words` are the values. They are 1 if it is not set."""
    layouts = [[each.layout for each in language(roles(word))] for word in words]
    return [
        {knob: np.array([1, *(each[kind][knob] for each in layouts)]) for knob in SPLITS.values()} for kind in (0, -1)
    ]


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


UNUSED_LIMITS = {"": (), PREFILL: DECODE_LIMITS, DECODE: PREFILL_LIMITS, ENCODE: (*DECODE_LIMITS, *PREFILL_LIMITS)}
"""The knobs that do not apply to a kind of instance."""


def of_kind(values: Mapping[str, KnobValue], kind: str) -> dict[str, KnobValue]:
    """Return the knob values of the instances of a kind, without limits for other kinds."""
    parts = roles(str(values[PREFILL_DECODE]))
    layout = next(each.layout for each in parts if each.kind == kind)
    unused = (*UNUSED_LIMITS[kind], *(COPIES if layout[EP] == 1 else ()))
    kind_values = {name: value for name, value in values.items() if name not in (*unused, PREFILL_EXCHANGE)}
    if kind == PREFILL and values.get(PREFILL_EXCHANGE):
        kind_values[EXCHANGE] = values[PREFILL_EXCHANGE]
    if kind == ENCODE:  # nothing of the language model applies
        kind_values = dict.fromkeys(kind_values)
    return {**kind_values, PREFILL_DECODE: None, INSTANCES: sum(each.count for each in parts), **layout}


class Placement(NamedTuple):
    """One instance of a candidate: its knob values, and the index `first` of its `width` devices.

    An instance on several `hosts` uses all their devices. `kind`: ENCODE, PREFILL or DECODE if the instance does only
    this, else empty.
    """

    values: Mapping[str, KnobValue]
    first: int
    width: int
    hosts: range = range(1)
    kind: str = ""


def placements(task: Task, values: Mapping[str, KnobValue]) -> tuple[Placement, ...]:
    """Return the instances of a legal candidate, each on consecutive devices, in the order of `Roles`."""
    word = values.get(PREFILL_DECODE)
    if isinstance(word, str):
        values_by_kind: dict[str, Mapping[str, KnobValue]] = {
            each.kind: of_kind(values, each.kind) for each in roles(word)
        }
        parts = [(each.devices, each.kind) for each in roles(word) for _ in range(each.count)]
    else:
        values_by_kind = {"": values}
        ranks = count(values, TP) * count(values, PP) * count(values, DP)
        parts = [(ranks, "")] * count(values, INSTANCES)
    found = places([devices for devices, _ in parts], Hardware.of(task))
    assert found is not None, "the candidate is legal"
    return tuple(
        Placement(values_by_kind[kind], first, width, hosts, kind)
        for (_, kind), (hosts, first, width) in zip(parts, found, strict=True)
    )


@dataclass(frozen=True, slots=True)
class InstanceKinds:
    """The kinds of instances of some candidates, one array element per kind, sorted by candidate.

    - `owner`: the index of the candidate.
    - `count`: the number of its instances of this kind, among which requests are divided.
    - `columns`: the knob values of each kind.
    - `role`: 1 for instances that only prefill, which come first, 2 for those that only decode, 3 for those that only
      encode images, which come last, 0 for others.
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
    """Return the kinds of instances of each candidate: those of PREFILL_DECODE if it is set, else one."""
    size = next(iter(columns.values())).size
    codes = np.broadcast_to(columns.get(PREFILL_DECODE, np.zeros(1, dtype=np.int64)), size)
    if not codes.any():
        return replace(uniform_kinds(columns.get(INSTANCES, np.ones(size, dtype=np.int64))), columns=columns)
    words = [roles(word) for word in known_roles(task)]
    owner = np.repeat(np.arange(size), np.array([1, *map(len, words)])[codes])
    place = np.arange(owner.size) - np.searchsorted(owner, owner)
    is_set = codes[owner] > 0

    def of_part(figure: Callable[[Role], int]) -> IntArray:
        """Return a figure of each row's instances, 0 where PREFILL_DECODE is not set."""
        table = np.zeros((1 + len(words), 3), dtype=np.int64)
        for code, parts in enumerate(words, 1):
            table[code, : len(parts)] = [figure(each) for each in parts]
        return np.asarray(table[codes[owner], place])

    kind_columns = {knob: column[owner] for knob, column in columns.items()}
    number = np.where(is_set, of_part(lambda each: each.count), np.maximum(kind_columns[INSTANCES], 1))
    kind_columns[ROLE] = role = of_part(lambda each: KINDS.index(each.kind))
    values = {knob: of_part(attrgetter(name)) for name, knob in SPLITS.items()}
    values[INSTANCES] = np.array([0, *(sum(each.count for each in parts) for parts in words)])[codes[owner]]
    values[PREFILL_DECODE] = np.zeros_like(owner)
    for knob in values.keys() & kind_columns.keys():
        kind_columns[knob] = np.where(is_set, values[knob], kind_columns[knob])
    for code, kind in enumerate(KINDS):
        for knob in kind_columns.keys() & {*UNUSED_LIMITS[kind]}:
            kind_columns[knob] = np.where(is_set & (role == code), 0, kind_columns[knob])
    if PREFILL_EXCHANGE in kind_columns:
        own = kind_columns.pop(PREFILL_EXCHANGE)
        kind_columns[EXCHANGE] = np.where((role == 1) & (own > 0), own, kind_columns[EXCHANGE])
    for knob in kind_columns.keys() & {*COPIES}:
        kind_columns[knob] = np.where(is_set & (kind_columns[EP] == 1), 0, kind_columns[knob])
    return InstanceKinds(owner, number, kind_columns, role)
