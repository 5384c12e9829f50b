"""The crossing against an enumeration, one combination at a time, that knows no chunk, no radix and no order."""

import dataclasses
import itertools
import random
import tracemalloc
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE

from flagcore.domain.engine import ForcedSetting, RefusedValues
from flagcore.domain.knob import Knob
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, Merge, Rule, Space
from flagcore.domain.spec import Task
from flagcore.errors import NoDevice, SpecError
from flagcore.tuner.stages import build as build_module
from flagcore.tuner.stages.build import build, check, legality, rejection_rules
from tests import tasks


def one_by_one(axes: Sequence[Axis], rules: Sequence[Rule], merges: Sequence[Merge]) -> set[tuple[int, ...]]:
    """Every combination, brought into its canonical form and then judged, as rows of codes."""
    rows = np.array(list(itertools.product(*([axis.encode(value) for value in axis.values] for axis in axes))))
    columns = {axis.knob: rows[:, place].astype(np.int64) for place, axis in enumerate(axes)}
    known = {
        axis.knob: {axis.encode(value) for value in (*axis.values, axis.neutral, *axis.extra_values)} for axis in axes
    }
    for merge in merges:
        changed = merge.canonical(columns)
        listed = np.logical_and.reduce([np.isin(changed[knob], list(known[knob])) for knob in changed])
        columns = columns | {knob: np.where(listed, changed[knob], columns[knob]) for knob in changed}
    legal = ~np.logical_or.reduce([rule.broken(columns) & np.ones(len(rows), dtype=bool) for rule in rules])
    return set(zip(*(columns[axis.knob][legal].tolist() for axis in axes), strict=True))


def balanced(space: Space) -> bool:
    return space.combinations == sum(space.illegal.values()) + space.merged + len(space)


def random_task(seed: int) -> Task:
    draw = random.Random(seed)
    space = {
        "micro_batch_size": tuple(draw.sample([1, 2, 3, 4, 8], 3)),
        "tensor_model_parallel_size": (1, 2, draw.choice([3, 4])),
        "recompute_method": draw.choice([("uniform",), ("block", "uniform"), (None, "block")]),
        "use_recompute": draw.choice([(False, True), (True,), (True, False)]),
    }
    model = dataclasses.replace(tasks.DENSE, num_layers=draw.choice([4, 6]))
    return tasks.task(model, devices=draw.choice([4, 8]), space=space, global_batch_size=24)


@pytest.mark.parametrize("seed", range(8))
def test_the_space_equals_an_enumeration_and_its_counts_add_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "CHUNK", 7 if seed % 2 else build_module.CHUNK)
    task = random_task(seed)
    axes, rules, merges = ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task)
    space = build(axes, rules, merges)
    columns = space.columns()
    rows = list(zip(*(columns[axis.knob].tolist() for axis in space.axes), strict=True))
    assert len(rows) > 3
    assert len(set(rows)) == len(rows)
    assert set(rows) == one_by_one(axes, rules, merges)
    assert balanced(space)


def test_each_rule_counts_all_combinations_that_it_removes() -> None:
    axes = [Axis(knob="a", values=(1, 2, 3), neutral=1), Axis(knob="b", values=(1, 2), neutral=1)]
    odd = Rule(name="odd", knobs=("a",), message="", broken=lambda c: c["a"] % 2 == 1)
    equal = Rule(name="equal", knobs=("a", "b"), message="", broken=lambda c: c["a"] == c["b"])
    space = build(axes, [odd, equal], [])
    assert space.illegal == {"odd": 4, "equal": 1}
    assert [candidate.as_dict() for candidate in map(space.candidate, range(len(space)))] == [{"a": 2, "b": 1}]


def test_find_returns_rows_of_candidates_in_the_space_only() -> None:
    task = random_task(3)
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    assert [space.find(space.candidate(row)) for row in range(len(space))] == list(range(len(space)))
    values = space.candidate(0).as_dict()
    assert space.find(Candidate.of(values | {"micro_batch_size": 977})) is None
    assert space.find(Candidate.of(values | {"data_parallel_size": 1, "tensor_model_parallel_size": 1})) is None


def test_a_candidate_that_was_not_listed_can_be_added_once() -> None:
    axes = [Axis(knob="a", values=(2, 4), neutral=1, extra_values=(8,)), Axis(knob="b", values=(1, 2), neutral=1)]
    space = build(axes, [], [])
    own = Candidate.of({"a": 8, "b": 2})
    assert space.find(own) is None
    wider = space.with_candidate(own)
    row = wider.find(own)
    assert row is not None
    assert wider.candidate(row) == own
    assert (len(wider), wider.combinations) == (5, 5)
    assert balanced(wider)
    assert wider.with_candidate(own) is wider
    with pytest.raises(ValueError, match="its axis does not have"):
        space.with_candidate(Candidate.of({"a": 16, "b": 2}))


def test_a_plugin_that_refuses_values_of_no_knob_is_reported() -> None:
    refused = RefusedValues(name="odd", knob="block_size", values=(16,), reason="?")
    with pytest.raises(NoDevice, match=r"block_size.*rule odd"):
        rejection_rules(ENGINE.axes(tasks.task()), [refused], tasks.task().spec)


@pytest.mark.parametrize(
    ("refused", "values", "broken"),
    [
        (  # a value that this release of the engine does not have
            RefusedValues(name="odd", knob="recompute_method", values=("diagonal", "block"), reason="?"),
            ("block", "uniform"),
            [True, False],
        ),
        (
            RefusedValues(name="wide", knob="tensor_model_parallel_size", values=(), above=4, reason="slow"),
            (1, 4, 8),
            [False, False, True],
        ),
    ],
)
def test_a_plugin_may_refuse_some_values(refused: RefusedValues, values: tuple[Any, ...], broken: list[bool]) -> None:
    axes = ENGINE.axes(tasks.task())
    (rule,) = rejection_rules(axes, [refused], tasks.task().spec)
    axis = next(axis for axis in axes if axis.knob == refused.knob)
    assert rule.broken({refused.knob: np.array([axis.encode(value) for value in values])}).tolist() == broken
    assert ("more than 4" in rule.message) == (refused.above == 4)


def test_check_reports_the_broken_rules_of_one_candidate() -> None:
    task = tasks.task()
    columns = ENGINE.columns(task, {"tensor_model_parallel_size": 3, "micro_batch_size": 3})
    canonical, broken = check(columns, ENGINE.rules(task), ENGINE.merges(task))
    assert [rule.name for rule in broken] == ["world_size", "global_batch_size"]
    assert canonical["tensor_model_parallel_size"].tolist() == [3]


def test_a_space_without_a_legal_candidate_is_empty_and_balanced() -> None:
    everything = Rule(name="all", knobs=("a",), message="", broken=lambda c: np.ones_like(c["a"], dtype=bool))
    space = build([Axis(knob="a", values=(1, 2), neutral=1)], [everything], [])
    assert (len(space), space.illegal, space.find(Candidate.of({"a": 1}))) == (0, {"all": 2}, None)
    assert list(space.chunks(10)) == []


def test_too_many_combinations_to_count_are_refused() -> None:
    axes = [Axis(knob=f"k{n}", values=tuple(range(1, 50_001)), neutral=1) for n in range(5)]
    rules = [Rule(name="one", knobs=(axis.knob,), message="", broken=lambda c, k=axis.knob: c[k] > 1) for axis in axes]
    with pytest.raises(SpecError, match="too many combinations"):
        build(axes, rules, [])


def test_more_candidates_than_can_be_held_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "MAX_ROWS", 1000)
    axes = [Axis(knob=knob, values=tuple(range(1, 101)), neutral=1) for knob in "ab"]
    with pytest.raises(SpecError, match="more than 1,000 candidates"):
        build(axes, [], [])


@pytest.mark.parametrize(("most", "rounds"), [(3000, 2), (1400, 1), (900, 0)])
def test_a_bound_that_keeps_some_rows_of_each_piece_judges_a_limited_number(
    monkeypatch: pytest.MonkeyPatch, most: int, rounds: int
) -> None:
    monkeypatch.setattr(build_module, "CHUNK", 100)
    monkeypatch.setattr(build_module, "BOUND_ROWS", 0)
    sizes = list[int]()

    def broken(columns: Columns) -> BoolArray:
        sizes.append(columns["a"].size)
        return np.arange(columns["a"].size) >= 30

    axes = [Axis(knob=knob, values=tuple(range(1, 32)), neutral=1) for knob in "abc"]
    limits = {"message": "", "broken": broken, "least_rows": 50, "most_rows": most}
    bounds: list[Any] = [Rule(name="best", knobs=tuple(each), **limits) for each in ("ab", "abc")]
    with nullcontext() if rounds == 2 else pytest.raises(SpecError, match=f"more than {most:,} candidates") as caught:
        assert len(build(axes, [], [], bounds)) == 30
    assert max(sizes, default=0) <= 100
    assert sum(sizes) <= most
    assert (caught is None) or "(31 values)" in str(caught.value)


def test_ten_million_combinations_need_little_memory() -> None:
    sizes = {f"{name}_parallel_size": tuple(range(1, 65)) for name in ("data", "tensor_model", "pipeline_model")}
    model = dataclasses.replace(tasks.DENSE, num_layers=24)
    task = tasks.task(model, devices=64, global_batch_size=1024, space={**sizes, "micro_batch_size": (1, 2, 4, 8, 16)})
    tracemalloc.start()
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert space.combinations >= 10_000_000
    assert balanced(space)
    assert 500 < len(space) < space.combinations / 20
    assert peak < 400 << 20


@pytest.mark.parametrize(
    ("knob", "train", "took"),
    [
        ("precision", {"precision": "fp8"}, True),
        ("precision", {"precision": "bf16"}, False),
        ("settings.does", {"settings": {"does": "fp8"}}, True),
        ("settings.does", {"command": ("train", "--does", "fp8")}, True),
        ("settings.does", {}, False),
    ],
)
def test_a_plugin_may_refuse_a_fixed_setting(knob: str, train: dict[str, Any], took: bool) -> None:
    task = tasks.task(space={"micro_batch_size": (1,)}, **train)
    refused = RefusedValues(name="no_fp8", knob=knob, values=("fp8",), reason="it has no units")
    axes = ENGINE.axes(task)
    (rule,) = rejection_rules(axes, [refused], task.spec)
    space = build(axes, [rule], ())
    assert (len(space) == 0) == took
    assert space.illegal == ({"no_fp8": space.combinations} if took else {})
    assert f"it has no units; change train.{knob}" in rule.message


def test_a_forced_setting_refuses_another_user_value() -> None:
    forced = ForcedSetting(name="one_way", setting="settings.does", value="p2p", reason="others hang")
    for value, broken in ((None, False), ("p2p", False), ("a2a", True)):
        task = tasks.task(settings={"does": value} if value else {})
        (rule,) = rejection_rules(ENGINE.axes(task), [forced], task.spec)
        assert rule.broken({"data_parallel_size": np.array([1])}).tolist() == [broken]
    assert "settings.does = a2a: it must be p2p: others hang" in rule.message


def test_a_knob_that_a_release_lacks_is_neutral_there() -> None:
    engine = SimpleNamespace(
        name="acme",
        knobs=(Knob(name="fused", kind="flag", neutral=False, versions=">=2"),),
        axes=lambda task: (Axis(knob="fused", values=(False, True), neutral=False, is_flag=True),),
        rules=lambda task: (),
        merges=lambda task: (),
    )
    for version, broken in (("1.4", [False, True]), ("2.0", None), (None, None)):
        rules = legality(tasks.platform(tasks.task(engine_version=version), engine=engine)).rules
        found = [rule.broken({"fused": np.array([0, 1])}).tolist() for rule in rules]
        assert found == ([] if broken is None else [broken])
