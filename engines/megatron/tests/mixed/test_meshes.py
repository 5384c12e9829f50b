"""Meshes: sizes of their own for each kind of chip, their rules, and the plan of those that may be the fastest."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.mixed import planner
from flagcore_megatron.mixed.hetero import as_asked, hosts_of, require_runnable
from flagcore_megatron.mixed.options import mesh_options
from flagcore_megatron.mixed.planner import _useful
from flagcore_megatron.space.knobs import plain_values
from flagcore_megatron.space.meshes import MESHES, SIZES

from engines.megatron.tests.layers.test_mixed_split import TIMES, chip, costs, mixed
from engines.training.tests.simulation import step_seconds
from flagcore.contracts import Costs
from flagcore.domain.chip import SPEED_TEST
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import ClusterSpec, Task
from flagcore.tuner.stages.build import build
from tests.checks import refuses
from tests.product import tasks

MODEL = Model(
    name="llama-1b-like",
    num_layers=12,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=128256,
)
EXPERTS = replace(MODEL, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=2048)


def task(*texts: str, model: Model = MODEL, devices: int = 8, **space: Any) -> Task:
    """A job on two kinds of chips, `fast` and `slow`."""
    groups = tuple(
        NodeGroup(chip=replace(chip(times), name=name), nodes=1, devices_per_node=devices)
        for name, times in (("fast", 1.0), ("slow", TIMES))
    )
    base = tasks.task(model, seq_length=4096, global_batch_size=32, space={MESHES: texts, **space})
    return replace(base, cluster=Cluster(groups=groups))


def pair(capacity: float = 80e9, slow_capacity: float = 32e9, devices: int = 8) -> Costs:
    first, second = costs(capacity=capacity), costs(TIMES, capacity=slow_capacity)
    return replace(mixed(first, second), further={devices: second})


def broken(job: Task, text: str, **values: Any) -> set[str]:
    columns = ENGINE.columns(job, {MESHES: text, **values})
    return {rule.name for rule in ENGINE.rules(job) if rule.broken(columns).any()}


LEGAL = "fast tp2 dp4 + slow tp4 dp2"
UNEVEN = "fast tp2 dp4 x6 | slow tp2 dp4 x2"
TIED = replace(MODEL, untie_embeddings_and_output_weights=False)


@pytest.mark.parametrize(
    ("text", "values", "rule"),
    [
        (LEGAL, {}, None),
        ("slow dp8 + fast tp8", {}, None),
        ("fast tp2 dp4", {}, None),
        ("fast dp8 + slow tp4 dp2", {"sequence_parallel": False}, "mesh_sequence_parallel"),
        ("fast tp2 dp2 + slow tp4 dp2", {}, "mesh_devices"),
        ("fast tp2 dp4 + slow cp2 dp4", {}, "mesh_context_parallel"),
        ("fast tp8 + slow dp8", {}, "mesh_batch"),
        (LEGAL, {"num_layers_per_virtual_pipeline_stage": 1}, "mesh_virtual"),
        ("fast pp8 + slow pp8", {}, "mesh_stages"),
        ("fast tp3 + slow dp8", {}, "attention_heads"),
        (LEGAL, {"model": TIED}, "mesh_embedding"),
        ("fast tp2 dp4 + slow tp2 dp4", {"model": TIED}, None),
        ("fast dp8 + slow ep2 dp8", {"model": EXPERTS}, "mesh_experts"),
        ("fast ep4 dp8 + slow ep2 dp8", {"model": EXPERTS}, None),
        (UNEVEN, {}, None),
        ("fast tp2 dp4 | slow tp2 dp4 full", {}, None),
        ("fast dp8 x2 | slow dp8 mbs2 x1", {"sequence_parallel": False}, None),
        (UNEVEN, {"micro_batch_size": 2}, "replicas_batch"),
        ("fast dp8 x3 | slow tp2 dp4 x2", {}, "replicas_shape"),
        ("fast dp4 pp2 x6 | slow dp8 x1", {}, "replicas_shape"),
        ("fast dp8 x3 | slow dp8", {}, "replicas_microbatches"),
        ("fast cp2 dp2 pp2 x14 | slow cp2 dp2 pp2 x2", {}, "replicas_context"),
        ("fast tp2 dp2 x12 | slow tp2 dp4 x2", {}, "mesh_devices"),
        ("fast dp1 pp8 x24 | slow dp1 pp8 x8", {}, "pipeline_stages"),
        ("fast ep4 dp8 x3 | slow ep4 dp8 x1", {"model": EXPERTS}, "replicas_experts"),
        ("fast dp8 x3 | slow dp8 x1", {"model": EXPERTS}, None),
        ("fast dp8 x3 | slow dp8 x1", {"model": replace(MODEL, mtp_num_layers=1)}, "replicas_mtp"),
    ],
)
def test_rules_of_meshes_have_names(text: str, values: Mapping[str, Any], rule: str | None) -> None:
    knobs = {"sequence_parallel": True, **values}
    found = broken(task(text, model=knobs.pop("model", MODEL)), text, **knobs)
    assert rule in found if rule else not found


@pytest.mark.parametrize(
    "text",
    [
        *("fast tp2 dp4 + grey dp8", "fast tp2x + slow dp8", "+", "fast x2 + slow x2"),
        *("fast dp8 | slow dp8 + slow dp8", "fast y2 | slow", "fast dp4 | fast dp4"),
    ],
)
def test_an_unreadable_mesh_is_refused_with_its_key(text: str) -> None:
    with refuses(f"auto_tuner.space.{MESHES}"):
        ENGINE.columns(task(text), {MESHES: text})


def predicted(job: Task, made: Costs) -> tuple[Any, Any]:
    """Return the space of meshes and its predictions."""
    axes, rules, merges = ENGINE.axes(job), ENGINE.rules(job), ENGINE.merges(job)
    space = build(axes, rules, merges)
    return space, ENGINE.predict(job, space.columns(), made)


def test_meshes_of_equal_sizes_are_predicted_like_plain_sizes() -> None:
    job = task("fast tp2 dp4 + slow tp2 dp4 full")
    values = {"tensor_model_parallel_size": 2, "data_parallel_size": 4, "pipeline_model_parallel_size": 2}
    full = {"use_recompute": True, "recompute_granularity": "full", "recompute_method": "uniform"}
    plain = {**values, "layer_split": "balanced", "sequence_parallel": True}
    equal = "fast tp2 dp4 full + slow tp2 dp4 full"
    both = task(equal)
    rows = [
        ENGINE.columns(both, {**plain, **full, "recompute_num_layers": 1}),
        ENGINE.columns(both, {MESHES: equal, "sequence_parallel": True}),
    ]
    first, second = (ENGINE.predict(both, row, pair()) for row in rows)
    assert first.step_time_s == pytest.approx(second.step_time_s)
    assert first.device_used_bytes == pytest.approx(second.device_used_bytes)
    row = ENGINE.columns(job, {MESHES: job.spec.space[MESHES][0], "sequence_parallel": True})
    assert ENGINE.predict(job, row, pair()).step_time_s[0] < second.step_time_s[0]


def test_the_order_of_the_meshes_is_that_of_the_pipeline() -> None:
    texts = "fast dp8 + slow dp8", "slow dp8 + fast dp8"
    job, made = task(*texts), pair(slow_capacity=12e9)
    columns = {name: np.concatenate(each) for name, each in _rows(job, texts).items()}
    predictions, layers = ENGINE.predict(job, columns, made), ENGINE.plans.stage_layers(job, columns, made)
    assert layers[0][0] > layers[0][1]
    assert layers[1][0] < layers[1][1]
    assert predictions.step_time_s[0] != predictions.step_time_s[1]


def _rows(job: Task, texts: tuple[str, ...]) -> dict[str, list[Any]]:
    rows = [ENGINE.columns(job, {MESHES: text}) for text in texts]
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("text", ["fast dp4 pp2 + slow tp4 pp2", "slow tp2 dp2 pp2 full + fast dp2 pp4"])
def test_the_time_of_unequal_stages_is_that_of_the_simulated_schedule(text: str) -> None:
    job, made = task(text), pair()
    row = ENGINE.columns(job, {MESHES: text, "micro_batch_size": 2, "sequence_parallel": True})
    (passes,) = ENGINE.plans.pipelines(job, row, made)
    assert passes is not None
    assert set(passes.groups) == {0, 1}
    assert max(passes.forward_s) > 1.05 * min(passes.forward_s)
    simulated = step_seconds(passes)
    assert passes.predicted_s == pytest.approx(simulated, rel=1e-9)
    step = ENGINE.predict(job, row, made).time_s
    assert sum(float(each[0]) for name, each in step.items() if name not in ("dp_comm_exposed_s", "optimizer_s")) == (
        pytest.approx(simulated)
    )


@pytest.mark.parametrize(
    "model",
    [pytest.param(MODEL, marks=pytest.mark.long), replace(EXPERTS, num_layers=60, num_moe_experts=256)],
    ids=["dense", "experts"],
)
@pytest.mark.costly
def test_thousands_of_devices_have_few_candidates(model: Model) -> None:
    sizes = (1.0, "fast"), (TIMES, "slow"), (2 * TIMES, "slower")
    groups = [
        NodeGroup(chip=replace(chip(times), name=name), nodes=128, devices_per_node=8, memory_bytes=None)
        for times, name in sizes
    ]
    first, *others = (costs(times, capacity=64e9) for times, _ in sizes)
    made = replace(mixed(first, others[0]), further={1024: others[0], 2048: others[1]})
    job = replace(replace_space(task(model=model), {}), cluster=Cluster(groups=tuple(groups)))
    job = job.with_batch(4096)
    platform = planner.with_meshes(tasks.platform(job, costs=made))
    space = build(ENGINE.axes(platform.task), ENGINE.rules(platform.task), ENGINE.merges(platform.task))
    assert 1_000 < np.count_nonzero(space.columns()[MESHES]) < len(space) < 60_000


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_sizes_of_planned_meshes_have_the_best_of_each_group_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flagcore_megatron.mixed.planner.LARGE", 0)
    made, whole = pair(devices=4), replace_space(task(model=model, devices=4), {})
    platform = planner.with_meshes(tasks.platform(whole, costs=made))
    for number, group in enumerate(whole.cluster.groups):
        alone = replace(whole, cluster=Cluster(groups=(group,)))
        few = replace_space(alone, planner.values_alone(platform.task, number))
        best = []
        for job in (few, alone):
            _, predictions = predicted(job, replace(made.groups[number], further={}, between=None))
            best.append(float(predictions.step_time_s[predictions.fits].min()))
        assert best[0] <= 1.01 * best[1]


def test_sizes_with_experts_in_parallel_do_not_crowd_out_the_others() -> None:
    job = replace_space(task(model=replace(EXPERTS, num_moe_experts=16)), {"use_distributed_optimizer": (True,)})
    options = mesh_options(job, replace(pair().groups[1], further={}, between=None), 1)
    some = options[np.flatnonzero((options.samples == 16) & (options.context == 1))]
    few = _useful(some[np.flatnonzero(some.ep == 1)], 12.0, np.inf, equal=())
    assert np.count_nonzero(_useful(some, 12.0, np.inf, equal=()).ep == 1) == few.ep.size > 20


def replace_space(job: Task, lists: Mapping[str, Any]) -> Task:
    space = {name: values for name, values in {**job.spec.space, **lists}.items() if name != MESHES}
    return replace(job, spec=replace(job.spec, space=space))


def best_of(job: Task, made: Costs) -> float:
    space, predictions = predicted(job, made)
    rows = (space.columns()[MESHES] > 0) & predictions.fits
    return float(predictions.step_time_s[rows].min())


def test_messages_between_meshes_of_other_sizes_are_split_and_take_longer() -> None:
    texts = "fast dp8 + slow dp8", "fast dp8 + slow tp2 dp4", "fast dp8 + slow tp8"
    job, made = task(*texts), pair()
    rows = [ENGINE.columns(job, {MESHES: text, "sequence_parallel": True}) for text in texts]
    messages = [float(ENGINE.predict(job, row, made).time_s["pp_comm_s"][0]) for row in rows]
    assert messages[0] < messages[1] < messages[2]


def on_hosts(job: Task, **space: Any) -> Task:
    """The job on two hosts of each kind."""
    kinds = tuple(ClusterSpec(chip=name, nodes=2, hosts=(f"{name}1", f"{name}2")) for name in ("fast", "slow"))
    cluster = ClusterSpec(groups=kinds, hosts=("fast1", "fast2", "slow1", "slow2"), nodes=4)
    groups = tuple(replace(group, nodes=2, devices_per_node=4) for group in job.cluster.groups)
    spec = replace(job.spec, cluster=cluster, launcher="ssh", space={**job.spec.space, **space})
    return replace(job, spec=spec, cluster=Cluster(groups=groups))


@pytest.mark.parametrize(
    ("text", "hosts", "pipeline"),
    [
        ("slow tp2 dp2 pp2 + fast tp2 dp2 pp2", ("slow1", "slow2", "fast1", "fast2"), 4),
        ("slow tp2 dp2 pp2 full", ("slow1", "slow2"), 2),
        (None, ("fast1", "fast2", "slow1", "slow2"), 1),
    ],
)
def test_a_trial_of_meshes_has_their_hosts_and_one_size(
    text: str | None, hosts: tuple[str, ...], pipeline: int
) -> None:
    job = on_hosts(task(text) if text else task())
    values = {**Candidate.of(dict.fromkeys(SIZES.values(), 1)).as_dict(), "micro_batch_size": 1, MESHES: text}
    candidate = Candidate.of(values)
    plain = plain_values(job, candidate)
    assert hosts_of(job, candidate) == hosts
    assert plain["pipeline_model_parallel_size"] == pipeline
    assert MESHES not in plain
    if text:
        assert (plain["tensor_model_parallel_size"], plain["layer_split"]) == (2, "balanced")
        assert plain["use_recompute"] is ("full" in text)
        wrong = {**plain, "tensor_model_parallel_size": 4}
        assert as_asked(job, candidate, wrong) == {"tensor_model_parallel_size": 4}


def test_the_speed_of_a_rank_is_that_of_its_device(tmp_path: Path) -> None:
    text = "slow tp2 dp2 pp2 + fast tp2 dp2 pp2"
    job = on_hosts(task(text))
    ranks = [{"rank": rank, SPEED_TEST: 1.0 if rank < 8 else 2.0} for rank in range(16)]
    steps = [{"step_time_s": 1.0, "loss": 1.0}] * job.spec.control.train_iters
    metrics = {"steps": steps, "ranks": ranks, "effective": {}, "versions": {}}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    measured = ENGINE.read(job, Candidate.of({MESHES: text}), str(tmp_path))
    found = {each["device"]: each[SPEED_TEST] for each in measured.devices}
    assert found == {device: 2.0 if device < 8 else 1.0 for device in range(16)}  # the slow hosts are the last ones


def test_trials_refuse_meshes_of_other_sizes() -> None:
    require_runnable(task("slow tp2 dp4 + fast tp2 dp4", "fast dp4 pp2"))
    for text in (LEGAL, "fast tp2 dp4 + slow tp2 dp4 full"):
        with refuses(f"auto_tuner.space.{MESHES}", text):
            require_runnable(task(text))


def test_the_meshes_of_trials_have_equal_sizes_and_another_order() -> None:
    job = on_hosts(replace_space(task(), {"context_parallel_size": (1,)}))
    made = planner.with_meshes(tasks.platform(job, costs=pair()), plan=False).task
    texts = [str(text) for text in made.spec.space[MESHES] if text]
    assert {text.split()[0] for text in texts} == {"fast", "slow"}
    assert not [text for text in texts if text.startswith("fast") and "+" in text]
    assert [text for text in texts if text.startswith("slow") and "+" in text]
    assert [text for text in texts if "|" in text]
    require_runnable(made)
