"""Validates the results of hooks when they are returned, so that errors of plugins do not appear later in a run.

Plain data is validated against the annotations of its dataclass, including all fields. The methods of objects are
called with arrays of two elements. Invalid results raise BadPlugin.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts, MemoryModel
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import TaskAdvice
from flagcore.domain.knob import Knob
from flagcore.loading.entry_points import short_repr, with_methods
from flagcore.loading.limits import BadPlugin
from flagcore.physics.collective_costs import Collectives
from flagcore.physics.collective_curves import KINDS, CollectiveTable

T = TypeVar("T")


def one(kind: type[T]) -> Callable[[object], T]:
    """Return a function that returns a hook's result unchanged if it is a valid instance of the class `kind`."""
    return lambda answer: cast(T, data(kind, answer, kind.__name__))


def several(kind: type[T]) -> Callable[[object], tuple[T, ...]]:
    """Return a function that returns a hook's result as a tuple, if it is a sequence of valid instances of `kind`."""
    return lambda answer: tuple(data(Sequence[kind], answer, kind.__name__))  # type: ignore[valid-type]


def environment(answer: object) -> dict[str, str]:
    """Return `answer` as a dict if it maps valid names of environment variables to valid values."""
    variables = dict(data(Mapping[str, str], answer))
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or "\0" in value:
            raise BadPlugin(
                f"returned the variable {name!r}: names consist of letters, digits and '_', and values contain no NUL"
            )
    return variables


def knobs(answer: object) -> tuple[Knob, ...]:
    """Return `answer` as a tuple if all its knobs have valid names, sources, effects and distinct values."""
    found = tuple(data(Sequence[Knob], answer))
    for knob in found:
        values = [(type(value), value) for value in knob.values]
        has_source = knob.source is not None and knob.source.detail.strip()
        if not re.fullmatch(r"[a-z][a-z0-9_]*", knob.name) or not knob.effects or not has_source:
            raise BadPlugin(f"returned the knob {knob.name!r}: it needs a name in lower case, effects and a source")
        if len(set(values)) != len(values) or len({kind for kind, _ in values} - {type(None)}) > 1:
            raise BadPlugin(
                f"returned the knob {knob.name}, whose values {knob.values} are not distinct, or differ in type"
            )
        for effect in knob.effects.values():
            environment(effect.environment)
    return found


def task_advice(answer: object) -> TaskAdvice:
    """Return `answer` if it is valid advice: all patterns compile, and their states are failures."""
    advice: TaskAdvice = data(TaskAdvice, answer, TaskAdvice.__name__)
    for pattern in advice.failures:
        if not pattern.state.failed:
            raise BadPlugin(
                f"returned the pattern {pattern.pattern!r}, whose state {pattern.state.value} is not a failure"
            )
        try:
            re.compile(pattern.pattern)
        except re.error as error:
            raise BadPlugin(f"returned the pattern {pattern.pattern!r}, which does not compile: {error}") from error
    return advice


def topology(answer: object, group: NodeGroup) -> Topology:
    """Return `answer` if its levels have increasing sizes, and the last one connects all devices of `group`."""
    found: Topology = data(Topology, answer)
    sizes = [level.devices for level in found.levels]
    if not sizes or sizes != sorted(set(sizes)) or sizes[-1] != group.devices:
        raise BadPlugin(f"returned levels with {sizes} devices; the numbers must increase up to {group.devices}")
    return found


def memory_model(answer: object) -> MemoryModel:
    """Return `answer` if it is a memory model whose methods work with arrays."""
    model: MemoryModel = check_protocol(MemoryModel, answer)
    capacity = model.capacity_bytes()
    if capacity is not None and not capacity > 0:
        raise BadPlugin(f"returned a memory model whose capacity_bytes() is {capacity!r}")
    for method in (model.reserved_bytes, model.device_used_bytes):
        _check_two_numbers(method, np.array([2.0**20, 2.0**30]))
    return model


def kernel_costs(answer: object) -> KernelCosts:
    """Return `answer` if it implements KernelCosts and its methods work with arrays. NaN is a valid time."""
    costs: KernelCosts = check_protocol(KernelCosts, answer)
    sizes = np.array([128.0, 256.0])
    _check_two_numbers(costs.gemm_seconds, sizes, sizes, sizes, "bf16")
    shape = AttentionShape(
        batch=sizes / 128, heads=sizes / 32, groups=sizes / 32, queries=sizes, keys=sizes, head_dim=sizes / 2
    )
    _check_two_numbers(costs.attention_seconds, shape, "bf16")
    _check_two_numbers(costs.attention_backward_seconds, shape, "bf16")
    _check_two_numbers(costs.memory_seconds, sizes)
    _check_two_numbers(costs.host_copy_seconds, sizes)
    for method, minimum in (("launch_seconds", 0.0), ("run_slowdown", 1.0)):
        value = data(float, getattr(costs, method)(), f"{method}()")
        if value < minimum:  # NaN passes, because it means unknown
            raise BadPlugin(f"returned an object whose {method}() is {value:g}, not {minimum:g} or more")
    return costs


def collective_costs(answer: object, topology: Topology) -> CollectiveCosts:
    """Return `answer` if it implements CollectiveCosts and its methods work with arrays. NaN is a valid time.

    If `answer` is a table of measured curves, return costs that apply the curves to `topology`.
    """
    if isinstance(answer, CollectiveTable):
        answer = Collectives(topology=topology, table=data(CollectiveTable, answer))
    costs: CollectiveCosts = check_protocol(CollectiveCosts, answer)
    ranks, stride = np.array([2, 2]), np.array([1, 1])
    for kind in KINDS:
        _check_two_numbers(costs.seconds, kind, np.array([2.0**10, 2.0**20]), ranks, stride)
    _check_two_numbers(costs.compute_share, ranks, stride)
    if not bool((np.asarray(costs.compute_share(ranks, stride)) <= 1.0).all()):
        raise BadPlugin("returned collective costs whose compute_share is above 1")
    return costs


def data(kind: Any, answer: Any, name: str = "") -> Any:
    """Return `answer` if it is a valid `kind`, including its elements and fields. Raises BadPlugin.

    Lists are accepted where tuples are expected.
    """
    origin, of = get_origin(kind), () if isinstance(answer, (str, bytes)) else get_args(kind)
    if (origin, of[1:]) in ((Sequence, ()), (tuple, (...,))) and of and of[0] is not Any:
        data(Sequence[Any] if origin is Sequence else tuple[Any, ...], answer, name)
        for place, each in enumerate(answer):  # all collections of a class share its schema, which takes long to build
            data(of[0], each, f"{name}[{place}]")
        return answer
    try:
        _adapter(kind).validate_python((answer,))
    except ValidationError as error:
        for found in error.errors(include_url=False):
            if found["type"] != "tuple_type" or not isinstance(found["input"], list):
                path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"][1:])
                message = found["msg"].replace("Input should be", "must be")
                text = f"{name}{path} = {short_repr(found['input'])}".lstrip(". =")
                raise BadPlugin(f"returned {text}: {message}") from None
    return answer


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a tuple with one `kind`, because pydantic accepts no configuration for a dataclass."""
    config = ConfigDict(strict=True, revalidate_instances="always", arbitrary_types_allowed=True)
    return TypeAdapter(tuple[kind], config=config)


def check_protocol(protocol: Any, answer: object) -> Any:
    """Return `answer` if it has all methods and attributes of `protocol`. Raises BadPlugin.

    `protocol`: a Protocol, or a base class from which the answer's class must inherit.
    """
    if isinstance(answer, type):
        raise BadPlugin(f"returned the class {answer.__name__}; return an object of it")
    if not getattr(protocol, "_is_protocol", False) and not isinstance(answer, protocol):
        base = f"flagcore.contracts.{protocol.__name__}"
        raise BadPlugin(f"returned {short_repr(answer)}, whose class does not inherit {base}")
    with_methods(protocol, answer)
    for name, kind in get_type_hints(protocol).items():
        data(kind, getattr(answer, name, None), f"{type(answer).__name__}.{name}")
    return answer


def _check_two_numbers(method: Callable[..., object], *arguments: object) -> None:
    found = np.asarray(method(*arguments), dtype=np.float64)
    if found.shape != (2,) or bool((found < 0).any()):
        name = getattr(method, "__name__", "a method")
        raise BadPlugin(
            f"returned an object whose {name} returns {short_repr(found)} for two rows; it must return two numbers"
        )
