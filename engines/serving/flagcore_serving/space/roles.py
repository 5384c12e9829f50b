"""Words for kinds of servers, such as 2xtp1+1xtp4: the counts and sizes of instances that prefill, decode or encode."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TypeAlias

import numpy as np

from flagcore.domain.space import KnobValue
from flagcore.domain.spec import AUTO, Task, is_rate
from flagcore.errors import SpecError
from flagcore_serving.load.routing import DECODE, ENCODE, PREFILL
from flagcore_serving.space.hardware import DP, EP, PP, PREFILL_DECODE, TP, Hardware, most_images
from flagcore_serving.space.weights import min_devices

KINDS = ("", PREFILL, DECODE, ENCODE)
"""The kinds of instances, in the order of `InstanceKinds.role`; the empty one prefills and decodes."""
SPLITS = {"tp": TP, "pp": PP, "dp": DP, "ep": EP}
ANSWER_COST = 2.5
"""Time of a device for a token of an answer, relative to a token of a prompt. It only selects divisions of devices.
Published node rates of DeepSeek on three chips have ratios of 2.3, 2.4 and 2.9 (lmsys.org, 2025-05-05, 2025-06-16 and
2025-09-26)."""
MAX_COUNTS = 12
"""Maximum number of divisions of the devices between two layouts that `auto` tries. A choice: then, neighboring
divisions differ by less than a tenth of the devices."""
MAX_WIDE_PREFILL = 64
"""Maximum number of devices of a prefill instance in wide expert parallelism. Published instances have 32."""
_ENCODERS = re.compile(r"(\d{1,6})xenc")
_KIND = re.compile(r"(\d{1,6})x(?=[tpde])(?:tp(\d{1,6}))?(?:pp(\d{1,6}))?(?:dp(\d{1,6}))?(?:ep(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Role:
    """The instances of one kind (of KINDS): their number, and the parallel sizes of each."""

    count: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    kind: str = ""

    @property
    def devices(self) -> int:
        """The number of devices of one instance."""
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> dict[str, int]:
        return {knob: getattr(self, name) for name, knob in SPLITS.items()}

    def __str__(self) -> str:
        if self.kind == ENCODE:
            return f"{self.count}xenc"
        others = "".join(f"{name}{size}" for name in ("pp", "dp", "ep") if (size := getattr(self, name)) > 1)
        return f"{self.count}xtp{self.tp}{others}"


Roles: TypeAlias = tuple[Role, ...]
"""The instances of a candidate: those that prefill and decode, or those that prefill, then those that decode. Those
that encode come last."""


@lru_cache(maxsize=1 << 16)
def roles(word: str) -> Roles:
    """Parse a value of PREFILL_DECODE. Raises ValueError if it is invalid."""
    first, *others = word.lower().replace(" ", "").split("+")
    encoders = _ENCODERS.fullmatch(first)
    matches = [_KIND.fullmatch(part) for part in (others if encoders else (first, *others))]
    if not all(matches) or not (len(matches) == 2 or (encoders and len(matches) == 1)):
        raise ValueError(word)
    kinds = (PREFILL, DECODE) if len(matches) == 2 else ("",)
    sizes = [[int(size or 1) for size in each.groups()] for each in matches if each]
    named = (dict(zip(("count", *SPLITS), each, strict=True)) for each in sizes)
    parts = [Role(**each, kind=kind) for each, kind in zip(named, kinds, strict=True)]
    parts += [Role(int(encoders[1]), kind=ENCODE)] if encoders else []
    if min(*(getattr(each, name) for each in parts for name in ("count", *SPLITS))) < 1:
        raise ValueError(word)
    return tuple(parts)


def language(parts: Roles) -> Roles:
    """Return the instances with the language model."""
    return tuple(each for each in parts if each.kind != ENCODE)


def parse_roles(value: object, key: str) -> str:
    """Return a value of PREFILL_DECODE in its shortest form. Raises SpecError, which names `key`, if it is invalid."""
    try:
        parts = roles(value if isinstance(value, str) else "")
    except ValueError:
        fix = "list the number and the layout of the instances that prefill and of those that decode: 2xtp2+1xtp4; "
        fix += "those that encode images, with one device each, may come first: 1xenc+2xtp2+1xtp4 or 1xenc+2xtp2"
        raise SpecError(key=key, value=value, problem="is not a valid value", fix=fix) from None
    return "+".join(map(str, sorted(parts, key=lambda each: each.kind != ENCODE)))


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
        encoding = next((each for each in spec_values if roles(each)[-1].kind == ENCODE), None)
        if encoding and task.spec.model.vision is None:
            problem, fix = "has instances that encode images, but the model has no vision tower", "remove them"
            raise SpecError(key=key, value=encoding, problem=problem, fix=fix)
    has_auto = task.spec.serve.default_space or AUTO in (listed if isinstance(listed, tuple) else (listed,))
    return tuple(dict.fromkeys((*((*_divisions(task), *_with_encoders(task)) if has_auto else ()), *spec_values)))


def auto_roles(task: Task) -> tuple[KnobValue, ...]:
    """Return the values of `auto` for PREFILL_DECODE.

    They are None (not set) and, if the objective is a rate, the ways to divide all devices into prefill and decode
    instances, for a load with images also with instances that encode.
    """
    return (None, *((*_divisions(task), *_with_encoders(task)) if is_rate(task.spec.objective) else ()))


def balanced_roles(task: Task) -> tuple[KnobValue, ...]:
    """Return the values of PREFILL_DECODE that a spec without a space searches.

    They are None (not set) and, for a rate of a model with experts on several hosts, some values of `auto`: for each
    layout of the prefill instances, with one and with several decode instances, the value whose share of devices for
    decoding is closest to the share of the work (see `ANSWER_COST`). Decode instances have attention DP groups.
    """
    cards, smallest, loads = Hardware.of(task).cards, min_devices(task), task.spec.serve.loads
    if Hardware.of(task).hosts == 1 or not task.spec.model.experts:
        return (None,)
    answers = ANSWER_COST * sum(load.output_len for load in loads)
    share = answers / (answers + sum(load.input_len for load in loads))
    words = _divisions(task) if is_rate(task.spec.objective) else ()
    pairs = [(roles(word)[0], roles(word)[1], word) for word in words]
    pairs.sort(key=lambda pair: abs(pair[1].count * pair[1].devices / cards - share))
    closest: dict[tuple[Role, bool], KnobValue] = {}
    for prefill, decode, word in pairs:
        if decode.dp > 1 and min(prefill.devices, decode.devices) >= smallest:
            closest.setdefault((replace(prefill, count=1), decode.count > 1), word)
    return (None, *closest.values())


def _divisions(task: Task) -> tuple[str, ...]:
    hardware = Hardware.of(task)
    has_experts = bool(task.spec.model.experts)
    return _all_divisions(hardware.cards, hardware.per_host, hardware.on_cores, has_experts, min_devices(task))


def _with_encoders(task: Task) -> tuple[str, ...]:
    """Return the ways to divide all devices of a load with images into 1, 2, 4, ... instances that encode, at most half
    of all, and equal instances that prefill and decode, or the ways to divide the others into those that do only one.
    """
    hardware, smallest, model = Hardware.of(task), min_devices(task), task.spec.model
    if model.vision is None or hardware.on_cores or not most_images(task.spec.serve.loads):
        return ()
    words = list[str]()
    for step in range((hardware.cards // 2).bit_length()):
        rest = hardware.cards - (1 << step)
        widths = _widths(rest, hardware.per_host, smallest)
        apart = _all_divisions(rest, hardware.per_host, False, bool(model.experts), smallest)
        both = [f"{rest // width}xtp{width}" for width in widths if rest % width == 0]
        words += [f"{1 << step}xenc+{word}" for word in (*both, *apart)]
    return tuple(words)


def _widths(most: int, per_host: int, smallest: int) -> list[int]:
    """Return the sizes of instances up to `most` devices: powers of two, at least half of `smallest`, that span hosts
    only if they do not fit on one."""
    widths = (1 << step for step in range(most.bit_length()))
    return [each for each in widths if smallest <= 2 * each and each <= max(per_host, smallest)]


@lru_cache(maxsize=16)
def _all_divisions(cards: int, per_host: int, on_cores: bool, has_experts: bool, smallest: int) -> tuple[str, ...]:
    """Return the ways to divide `cards` devices into prefill and decode instances without room for another instance.

    If the model has experts, an instance may also split them, with tensor parallelism or with one attention DP group
    per device. Sizes are those of `_widths`.
    """
    widths = _widths(cards - 1, per_host, smallest)
    layouts, wide = [Role(1)] if on_cores else [Role(1, width) for width in widths], list[str]()
    if has_experts and not on_cores:
        layouts += [Role(1, width, ep=width) for width in widths if width > 1]
        layouts += [Role(1, dp=width, ep=width) for width in widths if width > 1]
        wide = _wide_divisions(cards, per_host)
    divisions = list[str]()
    for first, second in product(layouts, repeat=2):
        counts = range(1, (cards - second.devices) // first.devices + 1)
        for number in _spread(counts):
            rest = cards - number * first.devices
            second_count, unused_devices = divmod(rest, second.devices)
            if second_count and unused_devices < min(first.devices, second.devices):
                divisions.append(f"{number}x{str(first)[2:]}+{second_count}x{str(second)[2:]}")
    return tuple(dict.fromkeys([*divisions, *wide]))


def _wide_divisions(cards: int, per_host: int) -> list[str]:
    """Return the ways to divide `cards` devices into prefill and decode instances with wide expert parallelism.

    Prefill instances span several hosts, and one decode instance spans all other hosts. All instances have one
    attention DP group per device.
    """
    widths = [per_host << step for step in range(1, cards.bit_length()) if per_host << step <= MAX_WIDE_PREFILL]
    pairs = [(width, number) for width in widths for number in _spread(range(1, cards // width + 1))]
    divisions = list[str]()
    for width, number in pairs:
        decode_devices = (cards - number * width) // per_host * per_host
        if decode_devices > per_host:
            divisions.append(f"{number}xtp1dp{width}ep{width}+1xtp1dp{decode_devices}ep{decode_devices}")
    return divisions


def _spread(counts: range) -> list[int]:
    """Return the range `counts`, or `MAX_COUNTS` evenly spaced numbers of it if it has more."""
    if len(counts) <= MAX_COUNTS:
        return list(counts)
    return sorted({int(each) for each in np.linspace(counts[0], counts[-1], MAX_COUNTS).round()})


@lru_cache(maxsize=1 << 16)
def fits(parts: Roles, hardware: Hardware) -> bool:
    """Return whether the instances have room on the hosts: whether `places` finds some for them.

    It fills the hosts as `places` does, but all instances of a kind at once.
    """
    if hardware.hosts == 1:
        return True
    kinds = sorted(((each.devices, each.count) for each in parts), reverse=True)
    if hardware.on_cores:
        instances = sum(each.count for each in parts)
        kinds = [(int(hardware.share(np.array([instances]))[0]), instances)]
    free = [(hardware.per_host, hardware.hosts)]  # free devices of a host, and the number of such hosts, in their order
    for devices, count in kinds:
        width, span = min(devices, hardware.per_host), max(1, devices // hardware.per_host)
        if width * span != devices:
            return False
        needed, left = count * span, list[tuple[int, int]]()
        for room, hosts in free:
            on_host = room // width
            full, rest = divmod(min(needed, on_host * hosts), on_host or 1)
            partly = min(rest, 1)
            left += [(room - on_host * width, full), (room - rest * width, partly), (room, hosts - full - partly)]
            needed -= full * on_host + rest
        if needed:
            return False
        free = [(room, hosts) for room, hosts in left if hosts]
    return True


def places(parts: Sequence[int], hardware: Hardware) -> list[tuple[range, int, int]] | None:
    """Return the hosts, the first device and the number of devices of each instance, or None if they do not fit.

    `parts`: the number of devices of each instance. CPU cores are divided evenly instead. Large instances are placed
    first, each on the first host with room for it or, if it is larger than a host, on whole hosts.
    """
    if hardware.on_cores:
        parts = [int(hardware.share(np.array([len(parts)]))[0])] * len(parts)
    order = sorted(range(len(parts)), key=lambda index: -parts[index])
    per_host = hardware.per_host if hardware.hosts > 1 else sum(parts)
    used, place_of = [0] * hardware.hosts, dict[int, tuple[range, int, int]]()
    start, before = 0, 0
    for index in order:
        span, on_host = max(1, parts[index] // per_host), min(parts[index], per_host)
        starts = range(start if parts[index] == before else 0, hardware.hosts - span + 1)
        first = next((first for first in starts if max(used[first : first + span]) + on_host <= per_host), None)
        if first is None or on_host * span != parts[index]:
            return None
        start, before = first, parts[index]
        place_of[index] = (range(first, first + span), used[first], parts[index])
        used[first : first + span] = [used[first] + on_host] * span
    return [place_of[index] for index in range(len(parts))]
