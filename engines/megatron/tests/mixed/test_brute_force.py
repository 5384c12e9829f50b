"""The best of the planned meshes is that of all meshes, orders and splits of layers."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.mixed.planner import planned
from flagcore_megatron.predict import stage_layers
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.meshes import MESHES, SIZES
from flagcore_megatron.space.stages import LAYOUT
from flagcore_training.knobs import divisors

from engines.megatron.tests.layers import test_mixed_split as test_mixed
from engines.megatron.tests.mixed.test_meshes import EXPERTS, MODEL
from flagcore.contracts import Costs
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.spec import Task
from flagcore.tuner.stages.build import build
from tests.product import tasks

LAYERS_OF_MODEL = 6
KINDS = {"fast": (1.0, 80e9), "slow": (2.5, 32e9), "small": (1.4, 9e9)}
"""How much slower a chip is, and its memory in bytes."""
LISTS: dict[str, Any] = {"context_parallel_size": (1,), "use_distributed_optimizer": (True,)}


def job(count: int, *texts: str, devices: int = 2, model: Any = EXPERTS, **settings: str) -> tuple[Task, Costs]:
    """Return a job on `count` kinds of chips with these meshes, and its costs."""
    kinds = list(KINDS.items())[:count]
    groups = tuple(
        NodeGroup(chip=replace(test_mixed.chip(times), name=name), nodes=1, devices_per_node=devices)
        for name, (times, _) in kinds
    )
    first, *others = (test_mixed.costs(times, capacity=capacity) for _, (times, capacity) in kinds)
    made = replace(test_mixed.mixed(first, others[0]), further={devices * n: c for n, c in enumerate(others, start=1)})
    space = {**LISTS, **({MESHES: texts} if texts else {})}
    base = tasks.task(replace(model, num_layers=LAYERS_OF_MODEL), seq_length=4096, global_batch_size=8, space=space)
    spec = replace(base.spec, work=replace(base.spec.train, settings=settings))
    return replace(base, spec=spec, cluster=Cluster(groups=groups)), made


def every(count: int, devices: int, model: Any, recompute: bool) -> list[str]:
    """Return all meshes on `count` kinds of chips, or on some of them, in all orders, without or with recomputation."""
    sizes = divisors(devices)
    own = [
        " ".join(f"{key}{size}" for key, size in zip(SIZES, (tensor, 1, expert, data, stages), strict=True)) + word
        for word in ("", " full")[: 1 + recompute]
        for tensor, expert, data, stages in product(sizes, divisors(model.num_moe_experts or 1), sizes, sizes)
        if tensor * data * stages == devices and (tensor * data) % expert == 0
    ]
    orders = [order for size in range(1, count + 1) for order in permutations(list(KINDS)[:count], size)]
    return [
        " + ".join(f"{kind} {mesh}" for kind, mesh in zip(order, meshes, strict=True))
        for order in orders
        for meshes in product(own, repeat=len(order))
    ]


def fastest(count: int, texts: list[str], most: int, **given: Any) -> list[tuple[float, dict[str, Any]]]:
    """Return the times and values of the fastest candidates with these meshes."""
    task, made = job(count, *texts, **given)
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    columns = space.columns()
    found = ENGINE.predict(task, columns, made)
    rows = np.flatnonzero((columns[MESHES] > 0) & found.fits)
    rows = rows[np.argsort(found.step_time_s[rows], kind="stable")][:most]
    return [(float(found.step_time_s[row]), space.candidate(int(row)).as_dict()) for row in rows]


def layouts(layers: int, stages: int) -> Iterator[str]:
    """Yield all splits; the last stage needs no layer."""
    for ends in combinations(range(1, layers + 1), stages - 1):
        counts = np.diff([0, *ends, layers]).tolist()
        yield f"E{'|'.join(f't*{count}' if count else '' for count in counts)}L"


@pytest.mark.parametrize(
    ("count", "devices", "model", "recompute"),
    [
        pytest.param(2, 4, MODEL, True, id="2-4-dense"),
        pytest.param(2, 4, EXPERTS, True, id="2-4-experts", marks=pytest.mark.long),
        pytest.param(2, 8, EXPERTS, False, id="2-8-experts", marks=pytest.mark.long),
        pytest.param(3, 2, MODEL, True, id="3-2-dense", marks=pytest.mark.long),
        pytest.param(3, 2, EXPERTS, False, id="3-2-experts"),
        pytest.param(3, 2, EXPERTS, True, id="3-2-experts, recompute", marks=pytest.mark.long),
    ],
)
def test_the_best_is_that_of_all_meshes_orders_and_splits(
    count: int, devices: int, model: Any, recompute: bool
) -> None:
    given = {"model": model, "devices": devices}
    task, made = job(count, **given)
    (found, values), *_ = fastest(count, list(planned(task, made)), 1, **given)
    best = fastest(count, every(count, devices, model, recompute), 2, **given)
    assert found <= 1.01 * best[0][0]
    for text in {values[MESHES], *(values[MESHES] for _, values in best)}:
        stages = sum(int((re.findall(r"pp(\d)", mesh) or "1")[0]) for mesh in text.split("+"))
        task, made = job(count, text, **given)
        (split,) = stage_layers(task, row_of(task, {**values, MESHES: text}), made)
        assert (len(split), sum(split)) == (stages, LAYERS_OF_MODEL)
        for layout in layouts(LAYERS_OF_MODEL, stages):
            split = fastest(count, [text], 1, **given, **{LAYOUT: layout})
            assert not split or found <= 1.01 * split[0][0]
