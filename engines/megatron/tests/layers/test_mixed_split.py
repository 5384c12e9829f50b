"""Pipelines over node groups of different chips: each stage has the times and the room of its own devices. Bars between
the stages of a hybrid pattern: read, placed for a candidate, and written into a launch."""

import dataclasses
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

import numpy as np
import pytest
from flagcore_megatron import start
from flagcore_megatron.layers.fastest import split_layers, virtual_stages
from flagcore_megatron.space import production
from flagcore_megatron.space.stages import check_symbols, pattern_stages, pattern_text, stages_with
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_training.layout import Layout, Options
from flagcore_training.memory.training import memory_in_use
from flagcore_training.splits import StageLayers
from flagcore_training.stages import StageGroups, placed
from flagcore_training.time.stage import Blocks
from flagcore_training.time.step import costs_in_run, step_time

from engines.megatron.tests.layers.test_splits import all_splits, cases, derived, slowest
from engines.models.tests.examples import layer_of
from engines.training.tests.simulation import (
    DEEPSEEK_16B,
    LLAMA,
    MOE,
    NETWORK,
    NODE,
    TOPOLOGY,
    layout,
    rank_memory,
    train,
)
from flagcore.contracts import Costs
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.cluster import Topology
from flagcore.domain.model import Model
from flagcore.errors import SpecError
from flagcore.physics.collective_costs import Collectives
from flagcore.physics.roofline import PlainMemory, Roofline
from tests.product import tasks
from tests.product.tasks import CHIP, SOURCE

TIMES = 2.5
"""How much slower the slow chip is in all that it does."""


def chip(times: float = 1.0) -> Chip:
    rates = {name: Fact(value=rate.value / times, source=SOURCE) for name, rate in CHIP.dense_flops_per_second.items()}
    bandwidth = Fact(value=3e12 / times, source=SOURCE)
    return replace(CHIP, dense_flops_per_second=rates, memory_bandwidth_bytes_per_second=bandwidth)


def costs(times: float = 1.0, capacity: float | None = 80e9, **extra: Any) -> Costs:
    topology = Topology(levels=(replace(NODE, bytes_per_second=400e9 / times), NETWORK))
    kernels, collectives = Roofline(chip=chip(times)), Collectives(topology=topology)
    return Costs(memory=PlainMemory(capacity=capacity), kernels=kernels, collectives=collectives, **extra)


def mixed(first: Costs, second: Costs, between: Topology = TOPOLOGY) -> Costs:
    """Two groups of eight devices."""
    return replace(first, further={8: second}, between=Collectives(topology=between))


def halves(**values: Any) -> Layout:
    """Return pipelines whose first half of the stages lies on the first eight devices."""
    return layout(**{"data": 8, "pipeline": 2, "microbatches": 16, "sharded_optimizer": 1, **values})


def seconds(split: Layout, made: Costs, model: Model = LLAMA, **work: Any) -> np.ndarray:
    return np.asarray(sum(step_time(train(model, **work), split, made).values()))


def test_stages_are_assigned_to_groups_in_rank_order() -> None:
    mixed_costs = replace(costs(), further={8: costs(), 24: costs()}, between=costs().collectives)
    place = StageGroups.from_layout(layout(data=[8, 2, 4], pipeline=[4, 16, 8]), mixed_costs)
    assert [start.tolist() for start in place.starts] == [[1, 4, 2], [3, 12, 6]]
    assert place.group(np.array([0.0, 4.0, 7.0])).tolist() == [0, 1, 2]
    counts = place.stages(layout(data=[8, 2, 4], pipeline=[4, 16, 8]))
    assert [count.tolist() for count in counts] == [[1, 4, 2], [2, 8, 4], [1, 4, 2]]


MESSAGES = {"pp_comm_s", "pp_bubble_s"}
"""One group takes the mean of all messages, two take the border's apart."""

EVERY = {
    "data": [8, 4, 2, 1, 4, 2, 8],
    "tensor": [1, 2, 1, 4, 1, 1, 1],
    "context": [1, 1, 2, 1, 1, 1, 1],
    "pipeline": [2, 2, 4, 4, 4, 8, 2],
    "virtual": [1, 1, 1, 1, 2, 1, 4],
    "expert_tensor": [1, 2, 1, 4, 1, 1, 1],
    "sequence_parallel": [0, 1, 0, 1, 0, 0, 0],
    "uniform": [0, 0, 1, 0, 0, 1, 0],
}


@pytest.mark.parametrize("model", [LLAMA, MOE, DEEPSEEK_16B], ids=lambda model: model.name)
@pytest.mark.parametrize("options", [Options(), Options(overlap_grad_reduce=True, schedule="zb-h1")])
def test_groups_of_equal_devices_are_one(model: Model, options: Options) -> None:
    split = halves(**EVERY)
    work = train(model, options=options)
    one, two = costs(), mixed(costs(), costs())
    one_group, two_groups = step_time(work, split, one), step_time(work, split, two)
    assert {name for name, part in two_groups.items() if part.tolist() != one_group[name].tolist()} <= MESSAGES
    np.testing.assert_allclose(sum(two_groups.values()), sum(one_group.values()), rtol=0.02)
    full, parted = memory_in_use(work, split, one), memory_in_use(work, split, two)
    for name in ("reserved", "used", "capacity"):
        np.testing.assert_array_equal(getattr(parted, name), getattr(full, name))
    np.testing.assert_array_equal(parted.memory.worst_stage, full.memory.worst_stage)
    np.testing.assert_array_equal(parted.memory.static, full.memory.static)


@pytest.mark.parametrize("model", [LLAMA, MOE], ids=lambda model: model.name)
def test_a_mixed_cluster_is_as_slow_as_its_slow_half(model: Model) -> None:
    split = halves(**EVERY)
    fast, slow = (seconds(split, costs(times), model) for times in (1.0, TIMES))
    for result in (mixed(costs(), costs(TIMES)), mixed(costs(TIMES), costs())):
        between = seconds(split, result, model)
        assert (fast < between).all()
        assert (between <= slow * (1 + 1e-12)).all()


@pytest.mark.parametrize("schedule", [None, "zb-h1", "v-half"])
@pytest.mark.parametrize("hidden", [True, False])
def test_only_stages_at_the_border_wait_for_the_link_between_groups(schedule: str | None, hidden: bool) -> None:
    options = Options(schedule=schedule, overlap_p2p_comm=hidden)
    split = halves(data=2, pipeline=8, virtual=[1, 2] if schedule is None else 1, microbatches=32)
    link = Topology(levels=(replace(NODE, devices=1), replace(NETWORK, bytes_per_second=10e9)))
    one = costs()
    mostly = mixed(one, costs(), link)
    crawling = replace(one, collectives=Collectives(topology=link))
    found = (step_time(train(LLAMA, options=options), split, result) for result in (one, mostly, crawling))
    none, some, all_ = (sum(step[name] for name in MESSAGES) for step in found)
    assert (none < some).all()
    if schedule == "v-half":
        np.testing.assert_allclose(some, all_)
    else:
        assert (some - none < 0.7 * (all_ - none)).all()


def test_gradients_and_optimizer_wait_for_the_slow_group() -> None:
    work, split = train(), halves()
    fast, slow = step_time(work, split, costs()), step_time(work, split, costs(TIMES))
    for result in (mixed(costs(), costs(TIMES)), mixed(costs(TIMES), costs())):
        found = step_time(work, split, result)
        assert fast["dp_comm_exposed_s"] < found["dp_comm_exposed_s"] <= slow["dp_comm_exposed_s"]
        assert fast["optimizer_s"] < found["optimizer_s"] <= slow["optimizer_s"]


def test_each_stage_is_compared_with_the_capacity_of_its_devices() -> None:
    split = halves(first_layers=[16, 6])
    needed = [memory_in_use(train(), halves(first_layers=each), costs()).used[0] for each in (16, 6)]
    large_memory, small_memory = costs(capacity=2.0 * max(needed)), costs(capacity=0.7 * needed[0])
    for mixed_costs, stage in ((mixed(small_memory, large_memory), 0), (mixed(large_memory, small_memory), 1)):
        found = memory_in_use(train(), split, mixed_costs)
        assert found.memory.worst_stage[0] == stage
        assert found.used[0] > found.capacity[0] == small_memory.memory.capacity_bytes()
    fewer = memory_in_use(train(), split, mixed(small_memory, large_memory))
    assert fewer.used[1] <= fewer.capacity[1]


def test_each_stage_has_the_context_and_workspace_of_its_own_device() -> None:
    model = PlainMemory(capacity=80e9, context_bytes=5e9, fragmentation=0.1, workspace=1e9)
    found = memory_in_use(train(), halves(), mixed(costs(capacity=1e15), replace(costs(), memory=model)))
    assert found.memory.worst_stage[0] == 1
    one_rank = rank_memory(train(), halves(), 8, workspace_bytes=1e9)
    assert found.memory.peak[0] == one_rank.peak[0]
    assert found.reserved[0] == pytest.approx(1.1 * one_rank.peak[0])
    assert found.used[0] == pytest.approx(found.reserved[0] + 5e9)


def test_a_stage_that_does_not_fit_is_found_despite_an_unknown_capacity() -> None:
    unknown, small = costs(capacity=None), costs(capacity=1e9)
    for mixed_costs in (mixed(unknown, small), mixed(small, unknown)):
        assert memory_in_use(train(), halves(), mixed_costs).capacity == 1e9
    assert np.isnan(memory_in_use(train(), halves(), mixed(costs(capacity=1e12), unknown)).capacity).all()


def test_an_unknown_rate_of_one_chip_gives_no_time() -> None:
    bare = replace(costs(), kernels=Roofline(chip=Chip(name="bare", vendor="test")))
    assert np.isnan(seconds(halves(), mixed(costs(), bare))).all()


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "virtual"), [("dense", 1), ("dense", 2), ("experts", 1)])
def test_a_derived_split_is_the_best_of_all_that_fit(kind: str, virtual: int) -> None:
    fast, slow = costs(capacity=3e9), costs(TIMES, capacity=1.2e9)
    for pair in (mixed(fast, slow), mixed(slow, fast), mixed(fast, replace(slow, memory=PlainMemory(capacity=None)))):
        drawn = cases(kind, pipeline=4, virtual=virtual, data=4, microbatches=64)
        for work, split in islice(drawn, 0, None, 5 if kind == "experts" else 2):
            every = all_splits(work, split)
            found = memory_in_use(*every, pair)
            best = np.where(~(found.used > found.capacity), slowest(*every, pair), np.inf).min()
            result = derived(work, split, pair)
            held = memory_in_use(*result, pair)
            assert bool(held.used[0] > held.capacity[0]) == bool(np.isinf(best))
            if np.isfinite(best):
                assert slowest(*result, pair)[0] == pytest.approx(best, rel=1e-6), work.model


KINDS = {
    "M": (Mamba2(num_heads=16, head_dim=64, state_size=64), ""),
    "*": ({}, ""),
    "-": (None, "dense"),
    "E": (None, "experts"),
}
SIZES: dict[str, Any] = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16, "kv_channels": 64}
WORK = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
PATTERN, PP, EACH = "hybrid_layer_pattern", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"


def model(pattern: str, **values: Any) -> Any:
    base = tasks.EXPERTS if "E" in pattern else tasks.DENSE
    found = dataclasses.replace(base, **{**SIZES, "num_query_groups": 16, "num_layers": len(pattern), **values})
    return dataclasses.replace(found, layers=tuple(layer_of(found, *KINDS[letter]) for letter in pattern))


def test_bars_and_slashes_of_a_pattern_are_stages_and_depths() -> None:
    hybrid = model("M-M*-", mtp_num_layers=1)
    assert pattern_stages("M-M*-/*-", hybrid) == ()
    first, *_, last = pattern_stages("M-|M*||-/*-", hybrid)
    assert first == StageLayers(embedding=1, layers=2)
    assert last == StageLayers(layers=1, mtp=1, loss=1)
    assert pattern_text(hybrid, [3, 0, 2]) == "M-M||*-/*-"
    assert pattern_text(hybrid, [5], "MM|MMM/M") == "MMMMM/M"
    with pytest.raises(SpecError, match="has 3 layers, but the model has 5"):
        pattern_stages("M-|M", hybrid)


@pytest.mark.parametrize(("pattern", "release"), [("Mm", None), ("M*m", "0.20"), ("MD", "0.17")])
def test_a_symbol_that_the_release_does_not_read_is_refused(pattern: str, release: str | None) -> None:
    with pytest.raises(SpecError, match=f"has '{pattern[-1]}', which megatron-core") as error:
        check_symbols(pattern, "key", release)
    assert ("set train.engine_version" in str(error.value)) is (pattern[-1] == "D")  # which newer releases read


@pytest.mark.parametrize("pattern", ["MEM*EMEM", "----MMMM", "M-M-M-*"])
@pytest.mark.parametrize("sizes", [{"pipeline": 3.0}, {"pipeline": 2.0}, {"pipeline": 2.0, "uniform": 1.0}])
def test_no_other_bars_make_the_slowest_stage_faster(pattern: str, sizes: dict[str, float]) -> None:
    work, split = train(model(pattern), transformer_engine=True), layout(microbatches=8.0, **sizes)
    costs, length = tasks.costs(tasks.task(), 80e9), int(sizes["pipeline"])
    running = costs_in_run(costs)

    def slowest(counts: list[int]) -> float:
        placed_layout, options = placed(work.model, split, work.options, stages_with(counts, 0))
        parts = step_time(dataclasses.replace(work, options=options), placed_layout, costs)
        return float(sum(parts[name] for name in WORK)[0])

    blocks = Blocks.from_layout(work, split, running)
    (found,) = virtual_stages(*split_layers(work, split, np.ones(1, dtype=np.bool_), running, blocks))
    cuts = combinations(range(1, len(pattern) + 1), length - 1)
    every = [np.diff([0, *cut, len(pattern)]).tolist() for cut in cuts]
    assert found in every
    assert slowest(found) <= 1.02 * min(map(slowest, every))


@pytest.mark.parametrize(
    ("knobs", "given", "expected"),
    [
        ({PP: 1}, "M-M-|M-M*", "M-M-M-M*"),
        ({PP: 2}, "M-M|-M-M*", "M-M|-M-M*"),
        ({PP: 2}, "", "M-M-|M-M*"),
        ({PP: 2, EACH: 2}, "", "M-|M-|M-|M*"),
    ],
    ids=["no stages", "those of the job", "even", "virtual"],
)
def test_a_launch_has_the_bars_of_its_candidate(knobs: dict[str, Any], given: str, expected: str) -> None:
    split = {"layer_split": "balanced"} if knobs[PP] == 1 else {}
    task = tasks.task(model("M-M-M-M*"), settings={PATTERN: given} if given else {}, devices=2)
    candidate = tasks.candidate(**{"data_parallel_size": 2 // knobs[PP], **knobs, **split})
    words = start.launch(tasks.platform(task), candidate, "", for_real=True).argv
    assert words[words.index("--hybrid-layer-pattern") + 1] == expected
    assert words.count("--hybrid-layer-pattern") == 1
    assert not {f"--{EACH.replace('_', '-')}", "--pipeline-model-parallel-layout"} & {*words}
    assert {"pretrain_hybrid.py", "--mamba-state-dim"} <= {*words}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "M-M|-M-|M*"), ({PATTERN: "M-M-M-M*"}, "M-M-M-M*"), ({PATTERN: "M-|M-M-|M*"}, "M-|M-M-|M*")],
    ids=["as published runs", "without bars", "of the job"],
)
def test_a_published_run_whose_layers_do_not_divide_has_bars(given: dict[str, Any], expected: str) -> None:
    task = tasks.task(model("M-M-M-M*"), settings=given, devices=3)
    found, _, _ = production.published(task, {PP: 3}, "")
    assert found.spec.train.settings[PATTERN] == expected
