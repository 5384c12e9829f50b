"""A data split: whole replicas on each kind of chips, with shares of the batch. The best of the planned meshes is that
of all meshes, orders and splits of layers."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.mixed import options, planner
from flagcore_megatron.mixed.hetero import mixed, require_runnable, shares
from flagcore_megatron.mixed.options import share_sizes
from flagcore_megatron.mixed.planner import planned, with_meshes
from flagcore_megatron.mixed.replicas import planned_replicas
from flagcore_megatron.predict import stage_layers
from flagcore_megatron.space.knobs import columns as row_of
from flagcore_megatron.space.knobs import plain_values
from flagcore_megatron.space.meshes import MESHES, SIZES
from flagcore_megatron.space.stages import LAYOUT
from flagcore_training.knobs import divisors

from engines.megatron.tests.layers import test_mixed_split as test_mixed
from engines.megatron.tests.mixed.test_meshes import (
    EXPERTS,
    MODEL,
    UNEVEN,
    best_of,
    costs,
    on_hosts,
    pair,
    predicted,
    replace_space,
    task,
)
from engines.megatron.tests.mixed.test_meshes import mixed as with_network
from flagcore.contracts import Costs
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task, TrainSpec
from flagcore.errors import LaunchError
from flagcore.tuner.stages.build import build
from tests.checks import refuses
from tests.product import tasks


def every(job: Task) -> list[str]:
    """Return all data splits of a job over two groups, without context parallelism."""
    devices, batch = job.cluster.groups[0].devices, job.spec.train.global_batch_size
    texts = []
    for tensor, pipeline in product(divisors(devices), divisors(devices)):
        if devices % (tensor * pipeline):
            continue
        replicas = devices // tensor // pipeline
        for sizes, words in product(product(share_sizes(batch), repeat=2), product(("", "full"), repeat=2)):
            for count in range(1, batch // (replicas * sizes[0]) + 1):
                other, rest = divmod(batch - replicas * sizes[0] * count, replicas * sizes[1])
                if other > 0 and not rest:
                    meshes = zip(("fast", "slow"), words, sizes, (count, other), strict=True)
                    shape = f"tp{tensor} pp{pipeline} dp{replicas}"
                    texts.append(" | ".join(f"{name} {shape} {word} mbs{size} x{n}" for name, word, size, n in meshes))
    return texts


@pytest.mark.parametrize("model", [pytest.param(MODEL, marks=pytest.mark.long), EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("capacity", "batch"), [((80e9, 80e9), 32), ((9e9, 6e9), 32), ((80e9, 80e9), 27)])
def test_the_planned_data_splits_have_the_best_of_all(model: Model, capacity: tuple[float, float], batch: int) -> None:
    made, lists = pair(*capacity, devices=4), {"context_parallel_size": (1,), "use_distributed_optimizer": (True,)}
    whole = replace_space(task(model=model, devices=4), lists).with_batch(batch)
    chosen, texts = planned_replicas(whole, made), every(whole)
    assert 0 < len(chosen) <= 64 < len(texts)
    best = best_of(task(*chosen, model=model, devices=4, **lists).with_batch(batch), made)
    alone = task(*texts, model=model, devices=4, micro_batch_size=(1,), **lists).with_batch(batch)
    assert best == pytest.approx(best_of(alone, made))


def test_meshes_with_their_own_micro_batch_sizes_are_one_candidate() -> None:
    space, _ = predicted(task("fast dp8 mbs1 x3 | slow dp8 mbs1 x1", "fast dp8 x1 | slow dp8 mbs1 x2"), pair())
    rows = [space.candidate(row).as_dict() for row in np.flatnonzero(space.columns()[MESHES] > 0)]
    found = {(row[MESHES], row["micro_batch_size"]) for row in rows}
    assert {size for text, size in found if "x3" in text} == {1}
    assert {size for text, size in found if "x3" not in text} == {2}


def test_shares_follow_the_speed_and_the_memory_of_the_chips() -> None:
    lists = {"tensor_model_parallel_size": (1,), "pipeline_model_parallel_size": (1,), "micro_batch_size": (1,)}
    job = replace_space(task(devices=8), {**lists, "context_parallel_size": (1,)})
    chosen = planned_replicas(job.with_batch(128), pair())[0]
    fast, slow = (int(part.rsplit("x", 1)[1]) for part in chosen.split(" | "))
    assert fast + slow == 16
    assert fast / slow > 2.0
    assert not planned_replicas(job, pair(slow_capacity=2e9))


def test_an_even_data_split_over_equal_groups_is_predicted_like_one_group() -> None:
    """Reductions go through the same networks in another order."""
    text = "fast tp2 dp4 | slow tp2 dp4"
    job, same = task(text), costs(capacity=80e9)
    made = replace(with_network(same, same), further={8: same})
    row = ENGINE.columns(job, {MESHES: text, "sequence_parallel": True, "use_distributed_optimizer": True})
    split = ENGINE.predict(job, row, made)
    one = replace(job, cluster=replace(job.cluster, groups=(replace(job.cluster.groups[0], nodes=2),)))
    plain = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True}
    alone = ENGINE.predict(one, ENGINE.columns(one, plain), same)
    for name in ("compute_s", "tp_comm_s", "pp_bubble_s", "optimizer_s"):
        assert split.time_s[name] == pytest.approx(alone.time_s[name])
    assert split.time_s["dp_comm_exposed_s"] == pytest.approx(alone.time_s["dp_comm_exposed_s"], rel=0.5)
    assert split.device_used_bytes == pytest.approx(alone.device_used_bytes)


def test_the_slowest_replicas_and_the_fullest_device_count() -> None:
    job, made = task(UNEVEN), pair()
    row = ENGINE.columns(job, {MESHES: UNEVEN, "micro_batch_size": 1, "sequence_parallel": True})
    predictions, pipelines = ENGINE.predict(job, row, made), ENGINE.plans.pipelines(job, row, made)
    work = sum(float(each[0]) for name, each in predictions.time_s.items() if name not in AFTER)
    assert [(each.groups, each.microbatches) for each in pipelines] == [((0,), 6), ((1,), 2)]
    assert work == pytest.approx(max(each.predicted_s or 0.0 for each in pipelines))
    assert (predictions.capacity_bytes, predictions.worst_stage) == (32e9, 1)  # the slow chips have less memory
    parts = ENGINE.plans.components(job, row, predictions.worst_stage, made)
    static = sum(float(part[name][0]) for part in parts.values() for name in part if name in STATIC)
    assert static == pytest.approx(float(predictions.static_bytes[0]))
    ranks = [ENGINE.probes.predict(job, row, rank, made).peak_allocated_bytes for rank in (0, 7, 8, 15)]
    assert ranks[0] == ranks[1]
    assert ranks[3] == pytest.approx(float(predictions.peak_allocated_bytes[0]))


AFTER = ("dp_comm_exposed_s", "optimizer_s")
STATIC = ("weights_bytes", "gradients_bytes", "main_params_bytes", "optimizer_bytes")


def test_a_trial_has_the_share_of_each_kind() -> None:
    text = "slow tp2 dp2 pp2 full x2 | fast tp2 dp2 pp2 mbs2 x7"
    job = on_hosts(task(text))
    values = {**dict.fromkeys(SIZES.values(), 1), "micro_batch_size": 1, MESHES: text}
    slow, fast = shares(job, Candidate.of(values))
    assert (slow["replicas"], slow["microbatches"], fast["microbatches"]) == (2, 2, 7)
    own = [dict(each["values"]) for each in (slow, fast)]
    assert [(each["micro_batch_size"], each["use_recompute"]) for each in own] == [(1, True), (2, False)]
    plain = plain_values(job, Candidate.of(values))
    assert [plain[SIZES[name]] for name in ("tp", "pp", "dp")] == [2, 2, 4]
    assert not plain["layer_split"]
    text = "fast tp2 dp4 + slow tp2 dp4"
    assert not shares(on_hosts(task(text)), Candidate.of({MESHES: text}))


def test_only_the_trial_program_runs_data_splits(tmp_path: Path) -> None:
    job = on_hosts(task(UNEVEN))
    require_runnable(job)
    command = replace(job.spec.train, command=("torchrun", "train_gpt.py", "--enable-hetero"))
    assert isinstance(command, TrainSpec)
    with refuses(f"auto_tuner.space.{MESHES}", match="replicas_release"):
        with_meshes(tasks.platform(replace(job, spec=replace(job.spec, work=command)), costs=pair()), plan=False)
    space, predictions = predicted(job, pair())
    cluster = job.spec.cluster
    same = replace(
        job.spec, cluster=replace(cluster, groups=tuple(replace(each, chip="fast") for each in cluster.groups))
    )
    for each in (job.spec, same, replace(same, work=command)):
        assert np.isinf(ENGINE.plans.unusual(replace(job, spec=each), space.columns(), predictions)).any()
    values = {**dict.fromkeys(SIZES.values(), 1), "micro_batch_size": 1, MESHES: UNEVEN}
    with pytest.raises(LaunchError, match=r"replicas_release.*give the number of a candidate"):
        ENGINE.launch(tasks.platform(job, costs=pair()), Candidate.of(values), str(tmp_path), for_real=True)
    with pytest.raises(LaunchError, match="replicas_release"):
        mixed(tasks.platform(job, costs=pair()), values)


def test_ways_to_split_a_job_have_names() -> None:
    job = task(UNEVEN, "fast tp2 dp4 + slow tp2 dp4", "fast dp8")
    space, _ = predicted(job, pair())
    ways = ENGINE.plans.splits(job, space.columns())
    texts = [space.candidate(row).as_dict()[MESHES] for row in range(len(space))]
    for name, sign in (("layer split", "+"), ("data split", "|")):
        assert {texts[row] for row in np.flatnonzero(ways[name])} == {text for text in texts if text and sign in text}


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


def every_split(count: int, devices: int, model: Any, recompute: bool) -> list[str]:
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
    ("count", "devices", "model", "recompute", "few"),
    [
        pytest.param(2, 4, MODEL, True, 3, id="2-4-dense"),
        pytest.param(2, 4, EXPERTS, True, 1, id="2-4-experts", marks=pytest.mark.long),
        pytest.param(2, 8, EXPERTS, False, 3, id="2-8-experts", marks=pytest.mark.long),
        pytest.param(3, 2, MODEL, True, 1, id="3-2-dense", marks=pytest.mark.long),
        pytest.param(3, 2, EXPERTS, False, 1, id="3-2-experts, as of many kinds"),
        pytest.param(3, 2, EXPERTS, True, 3, id="3-2-experts, recompute", marks=pytest.mark.long),
    ],
)
@pytest.mark.costly
def test_the_best_is_that_of_all_meshes_orders_and_splits(
    count: int, devices: int, model: Any, recompute: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (planner, options):
        monkeypatch.setattr(module, "FEW", few)
    given = {"model": model, "devices": devices}
    task, made = job(count, **given)
    (found, values), *_ = fastest(count, list(planned(task, made)), 1, **given)
    best = fastest(count, every_split(count, devices, model, recompute), 2, **given)
    assert found <= 1.01 * best[0][0]
    for text in {values[MESHES], *(values[MESHES] for _, values in best)}:
        stages = sum(int((re.findall(r"pp(\d)", mesh) or "1")[0]) for mesh in text.split("+"))
        task, made = job(count, text, **given)
        (split,) = stage_layers(task, row_of(task, {**values, MESHES: text}), made)
        assert (len(split), sum(split)) == (stages, LAYERS_OF_MODEL)
        for layout in layouts(LAYERS_OF_MODEL, stages):
            split = fastest(count, [text], 1, **given, **{LAYOUT: layout})
            assert not split or found <= 1.01 * split[0][0]
