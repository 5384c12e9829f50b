"""Instances of several sizes on one set of cards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flagcore.domain.space import Space
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous
from flagcore.engines.serving.common.hardware import INSTANCES, SIZES, TP, Hardware
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as LLAMACPP
from flagcore.engines.serving.sglang.profile import WORKLOAD as SGLANG
from flagcore.engines.serving.vllm.profile import WORKLOAD as VLLM
from flagcore.errors import SpecError
from tests.engines.serving.engines.tasks import broken, merged, serving, space_of
from tests.small import DENSE

ENGINES = pytest.mark.parametrize("engine", [LLAMACPP, SGLANG, VLLM], ids=lambda e: e.name)
HEADS = dataclasses.replace(DENSE, num_attention_heads=16, num_query_groups=8)


def cards(engine: Engine, count: int = 8, **arguments: Any) -> Task:
    task = serving(engine.name, devices=count, **{"model": HEADS, **arguments})
    return dataclasses.replace(task, spec=dataclasses.replace(task.spec, objective="output_tokens_per_s"))


def split(space: Space) -> list[object]:
    every = [space.candidate(row).as_dict()[SIZES] for row in range(len(space))]
    return [each for each in every if each is not None]


@ENGINES
def test_unequal_instances_are_opt_in(engine: Engine) -> None:
    task = cards(engine, space={INSTANCES: "auto", TP: "auto"})
    assert split(space_of(engine, task)) == []


@ENGINES
def test_auto_contains_each_split_of_all_cards_once(engine: Engine) -> None:
    space = space_of(engine, cards(engine, space={INSTANCES: "auto", TP: (2, 4), SIZES: "auto"}))
    found = split(space)
    assert sorted(map(str, found)) == ["2+1+1+1+1+1+1", "2+2+1+1+1+1", "2+2+2+1+1", "4+1+1+1+1", "4+2+1+1", "4+2+2"]
    rows = [space.candidate(row).as_dict() for row in range(len(space))]
    assert {(row[INSTANCES], row[TP]) for row in rows if row[SIZES]} == {(1, 1)}
    assert space.combinations == sum(space.illegal.values()) + space.merged + len(space)


@ENGINES
def test_one_instance_is_tuned_for_a_latency_unless_the_space_has_more(engine: Engine) -> None:
    task = cards(engine, space={INSTANCES: "auto", SIZES: "auto"})
    quick = dataclasses.replace(task, spec=dataclasses.replace(task.spec, objective="ttft_s.p99"))
    assert len(space_of(engine, quick)) == 1
    named = dataclasses.replace(quick, spec=dataclasses.replace(quick.spec, space={INSTANCES: (1, 2)}))
    assert len(space_of(engine, named)) == 2


@ENGINES
def test_a_split_may_leave_cards_free_and_its_order_does_not_matter(engine: Engine) -> None:
    space = space_of(engine, cards(engine, space={SIZES: ("2+4", "4+2")}))
    assert split(space) == ["4+2"]


@pytest.mark.parametrize("given", ["2+2", "8", "4+0", "4+x", "4-2", 6, True])
def test_an_invalid_unequal_split_is_reported(given: object) -> None:
    with pytest.raises(SpecError) as caught:
        VLLM.axes(cards(VLLM, space={SIZES: (given,)}))
    assert caught.value.key == "auto_tuner.space.instance_sizes"


@ENGINES
def test_more_cards_than_available_are_illegal(engine: Engine) -> None:
    task = cards(engine, 4, space={SIZES: ("4+2",)})
    assert "cards_of_sizes" in broken(engine, task, **{SIZES: "4+2"})
    assert broken(engine, task, **{SIZES: "2+1"}) == []


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda e: e.name)
def test_each_instance_has_whole_attention_heads_and_is_tensor_parallel_alone(engine: Engine) -> None:
    task = cards(engine)
    assert "heads_of_sizes" in broken(engine, task, **{SIZES: "3+2"})
    assert "sizes_are_tensor_ranks" in broken(engine, task, **{SIZES: "4+2", "pipeline_model_parallel_size": 2})


def test_on_cores_a_size_also_sets_the_threads() -> None:
    task = serving("llamacpp", devices=4, on_cores=True)
    codes = merged(LLAMACPP, task, **{SIZES: "3+1", "threads": 2, "threads_batch": 1, INSTANCES: 2})
    assert (codes["threads"], codes["threads_batch"], codes[INSTANCES]) == (0, 0, 1)


def test_splits_of_many_cards_are_few_and_of_large_instances() -> None:
    tried = heterogeneous.auto_sizes(cards(VLLM, 64))
    assert "32+16+16" in tried
    assert len(tried) < 40
    assert all(sum(heterogeneous.sizes(str(word))) == 64 for word in tried[1:])


@ENGINES
def test_kinds_of_instances_are_separate_settings(engine: Engine) -> None:
    task = cards(engine, space={SIZES: (None, "4+2+2"), INSTANCES: (2,), TP: (4,)})
    kinds = heterogeneous.instance_kinds(task, space_of(engine, task).columns())
    found = engine.settings(task, kinds.columns)
    by_candidate = [[(int(found.tensor[row]), int(kinds.count[row])) for row in rows] for rows in kinds.members]
    assert sorted(by_candidate) == [[(4, 1), (2, 2)], [(4, 2)]]
    assert kinds.total(found.devices).tolist() == [8.0, 8.0]
    assert sorted(found.instances.tolist()) == [2, 3, 3]


def test_kinds_on_cores_have_separate_cores() -> None:
    task = serving("vllm", devices=4, on_cores=True, space={SIZES: ("2+1+1",)})
    kinds = heterogeneous.instance_kinds(task, space_of(VLLM, task).columns())
    assert VLLM.settings(task, kinds.columns).devices.tolist() == [2, 1]


def test_the_fullest_kind_determines_the_memory_of_a_candidate() -> None:
    kinds = heterogeneous.InstanceKinds(np.array([0, 0, 1]), np.array([1, 2, 4]), {})
    assert kinds.worst(np.array([1.0, 3.0, 2.0])).tolist() == [1, 2]
    assert kinds.total(np.array([1.0, 3.0, 2.0])).tolist() == [7.0, 8.0]


def test_cards_that_do_not_exist_are_reported() -> None:
    with pytest.raises(SpecError) as error:
        Hardware.of(cards(VLLM, 8, cards=9))
    assert (error.value.key, error.value.value) == ("auto_tuner.cards", 9)
    assert Hardware.of(cards(VLLM, 8, cards=6)).cards == 6
