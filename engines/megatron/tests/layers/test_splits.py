"""Derived splits of layers against all splits that there are, in time and under limits of memory. Layouts of pipeline
stages: Megatron's own grammar, and how published runs dealt out layers that do not divide."""

import dataclasses
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.layers.fastest import fit_splits, layouts, split_layers
from flagcore_megatron.predict import base_inputs, inputs
from flagcore_megatron.space.options import options
from flagcore_megatron.space.split import SPLIT
from flagcore_megatron.space.stages import (
    EMBEDDING,
    LAYOUT,
    LOSS,
    chunk_layers,
    even_split,
    layout_text,
    may_start_empty,
    parse_layout,
    published_split,
)
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.training import memory_in_use, stages_in_use
from flagcore_training.stages import placed, splits_with, stage, stage_of
from flagcore_training.time.stage import Blocks
from flagcore_training.time.step import costs_in_run, step_time

from engines.training.tests.simulation import layout, public, train
from flagcore.contracts import Costs
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray, IntArray
from flagcore.errors import SpecError
from flagcore.tuner.stages.build import build
from tests.checks import given, refuses
from tests.product import tasks

PP, EACH = "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
DENSE = dataclasses.replace(
    tasks.DENSE, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, num_query_groups=4, kv_channels=64
)
WIDE = dataclasses.replace(DENSE, vocab_size=200_000)
EXPERTS = dataclasses.replace(WIDE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512)
HEAVY = dataclasses.replace(EXPERTS, ffn_hidden_size=32768, mtp_num_layers=1)
WORK = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")


def costs(capacity: float | None = 80e9) -> Costs:
    return tasks.costs(tasks.task(), capacity)


def derived(work: Training, split: Layout, of: Costs) -> tuple[Training, Layout]:
    """Return candidates with the splits that `predict` gives them."""
    every, running = np.ones(split.pipeline.shape, dtype=np.bool_), costs_in_run(of)
    blocks = Blocks.from_layout(work, split, running)
    work, split = split_layers(work, split, every, running, blocks)
    found = memory_in_use(work, split, of)
    return fit_splits(work, split, every, found.used / found.capacity, running, blocks)[:2]


def slowest(work: Training, split: Layout, of: Costs) -> np.ndarray:
    """Return the seconds of a micro-batch on the slowest stage of each candidate."""
    parts = step_time(work, split, of)
    return np.asarray(sum(parts[name] for name in WORK)) / split.microbatches


def all_splits(work: Training, split: Layout) -> tuple[Training, Layout]:
    """Return a candidate with each of its splits: a layer on each (virtual) stage, none needed on the last one and on
    the first of several virtual ones, and none on the last one and none needed before it where multi-token prediction
    is early."""
    length, chunks = int(split.pipeline[0]), int(split.virtual[0])
    most = work.options.early_mtp and (length > 2 or chunks == 1)
    held = np.concatenate([_holdings(work, length, chunks, early) for early in range(1 + most)])
    splits = splits_with(work.model, held, np.full(len(held), length))
    rows = split[np.zeros(len(held), dtype=np.int64)]
    rows = dataclasses.replace(rows, split=np.arange(1.0, len(held) + 1.0))
    return dataclasses.replace(work, options=dataclasses.replace(work.options, splits=splits)), rows


def _holdings(work: Training, length: int, chunks: int, early: int) -> FloatArray:
    model, layers = work.model, work.model.num_layers
    first = 0 if chunks > 1 and may_start_empty(model) else 1
    cuts = combinations(range(first, layers + 1), length * chunks - 1 - early)
    counts = [(*np.diff([0, *cut, layers]).tolist(), *[0] * early) for cut in cuts]
    if early and chunks > 1:  # no leading layer is on a last virtual stage
        counts = [each for each in counts if sum(each[:-length]) >= model.moe_first_dense_layers]
    table = np.array(counts, dtype=np.float64).reshape(-1, length * chunks)
    before, experts = np.cumsum(table, axis=1) - table, model.num_moe_experts is not None
    leading = np.clip(model.moe_first_dense_layers - before, 0.0, table) * experts
    devices = np.stack((table, leading), axis=2).reshape(len(table), chunks, length, 2).sum(axis=1)
    devices = np.unique(devices, axis=0) if len(devices) else devices
    tables = np.zeros((len(devices), length * chunks, 4))
    for row, each in zip(tables, devices.astype(np.int64), strict=True):
        row[:, 2] = virtual_stages(each, model, chunks, early)
        row[0, 0] = row[-1, 1] = 1.0
        row[-1 - early, 3] = model.mtp_num_layers
    return tables


def virtual_stages(held: IntArray, model: Model, virtual: int, early: int) -> list[int]:
    """Return the layers of virtual stages, which must be what the devices hold."""
    found = chunk_layers(held[:, 0].tolist(), held[:, 1].tolist(), virtual, early=bool(early))
    counts = np.array(found)
    leading = np.clip(model.moe_first_dense_layers - (np.cumsum(counts) - counts), 0, counts)
    assert counts[virtual > 1 and may_start_empty(model) : -1 - early].all()
    assert not (early and counts[-1])
    np.testing.assert_array_equal(counts.reshape(virtual, -1).sum(axis=0), held[:, 0])
    if model.num_moe_experts is not None:
        np.testing.assert_array_equal(leading.reshape(virtual, -1).sum(axis=0), held[:, 1])
    return found


CASES: dict[str, list[Model]] = {
    "dense": [dataclasses.replace(DENSE, num_layers=count) for count in range(3, 10)],
    "experts": [
        dataclasses.replace(each, num_layers=count, moe_first_dense_layers=leading)
        for each in (EXPERTS, HEAVY)
        for count in (4, 6, 7, 9)
        for leading in range(4)
    ],
}
RECOMPUTE: list[dict[str, float]] = [{}, {"uniform": 1.0}, {"block": 1.0}, {"selective": 1.0}]


def cases(kind: str, **counts: float) -> Iterator[tuple[Training, Layout]]:
    for model in CASES[kind]:
        stages = counts["pipeline"] * counts["virtual"]
        if stages - 1 <= model.num_layers <= (9 if stages < 7 else 8):
            yield train(model, transformer_engine=kind != "dense"), layout(**counts)


SHAPES = [(2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2), (2, 3)]


def drawn(draw: np.random.Generator) -> tuple[Training, Layout]:
    """Return a random candidate of a small model."""
    pipeline, virtual = SHAPES[draw.integers(len(SHAPES))]
    model, tensor, data = (DENSE, WIDE, EXPERTS, HEAVY)[draw.integers(4)], draw.integers(1, 3), draw.choice([1, 4])
    layers = int(draw.integers(max(3, pipeline * virtual - 1), 10))
    leading = 0 if model.num_moe_experts is None else min(int(draw.integers(5)), layers - 1)
    depths = int(draw.integers(2))
    model = dataclasses.replace(model, num_layers=layers, moe_first_dense_layers=leading, mtp_num_layers=depths)
    work = train(model, sequence=int(draw.choice([1024, 4096])), transformer_engine=bool(draw.integers(2)))
    early = bool(depths) and bool(draw.random() < 0.7)
    options = dataclasses.replace(work.options, early_mtp=early, overlap_p2p_comm=not early)
    work = dataclasses.replace(work, options=options)
    extra = {"tensor": tensor, "expert_tensor": tensor, "data": data, "sharded_optimizer": draw.integers(2)}
    recompute = RECOMPUTE[draw.integers(len(RECOMPUTE))]
    microbatches = pipeline * draw.choice([1, 2, 4, 8])
    return work, layout(pipeline=pipeline, virtual=virtual, microbatches=microbatches, **extra, **recompute)


@pytest.mark.parametrize("seed", [17, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2026, 2027))])
@pytest.mark.costly
def test_splits_of_random_candidates_are_optimal_with_and_without_memory_limits(seed: int) -> None:
    draw, narrower = np.random.default_rng(seed), 0
    for _ in range(24):
        work, split = drawn(draw)
        share = float(draw.random())
        every = all_splits(work, split)
        if not every[1].split.size:
            continue
        seconds, used = slowest(*every, costs()), memory_in_use(*every, costs(0.0)).used  # without what only may be
        free = derived(work, split, costs())
        assert slowest(*free, costs())[0] == pytest.approx(seconds.min(), rel=1e-6), (work.model, split)
        needed = memory_in_use(*free, costs(0.0)).used[0]
        low = used.min()
        if low >= needed:
            continue
        capacity = low + share * (needed - low)
        fits, chosen = used <= capacity, derived(work, split, costs(capacity))
        if fits.any():
            assert memory_in_use(*chosen, costs(0.0)).used[0] <= capacity, (work.model, split)
            assert slowest(*chosen, costs())[0] == pytest.approx(seconds[fits].min(), rel=1e-6), (work.model, split)
            narrower += 1
    assert narrower > 3


@pytest.mark.parametrize("seed", [3, 4])
def test_more_layers_on_a_stage_never_need_less_memory(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(60):
        work, split = drawn(draw)
        model, place = work.model, float(draw.integers(int(split.pipeline[0])))
        leading = min(model.moe_first_dense_layers, int(draw.integers(3)))
        layers = np.arange(max(leading, split.virtual[0]), 30.0)
        many = dataclasses.replace(split[np.zeros(layers.size, dtype=np.int64)], split=np.ones(layers.size))
        index = np.full(layers.size, place)
        (found,) = stages_in_use(work, many, costs(), [stage_of(work, many, index, layers, leading)])
        assert (np.diff(found.used) >= 0).all(), (model, split, place, leading)


@pytest.mark.parametrize(("layers", "pipeline"), [*product((61, 94), (4, 8, 16))])
def test_layers_that_do_not_divide_are_spread_with_the_loss_and_multi_token_prediction(
    layers: int, pipeline: int
) -> None:
    model = dataclasses.replace(EXPERTS, num_layers=layers, mtp_num_layers=1, moe_first_dense_layers=3)
    work, split = derived(train(model), layout(pipeline=[pipeline] * 2, virtual=[1, 2], microbatches=64), costs())
    held = np.stack([stage(model, split, np.full(2, float(place)), work.options).layers for place in range(pipeline)])
    assert held.sum(axis=0).tolist() == [layers, layers]
    assert (held[-1] < held[1:-1].max(axis=0)).all()  # the last stage has the loss, too
    assert (np.ptp(held[1:-1], axis=0) <= 1).all()


def test_layout_of_a_derived_split_means_that_split() -> None:
    for virtual, pipeline, leading in product((1, 2, 3), (2, 3, 4), range(5)):
        model = dataclasses.replace(HEAVY, num_layers=13, moe_first_dense_layers=leading)
        split = layout(pipeline=pipeline, virtual=virtual)
        found = derived(train(model), split, costs())
        (text,) = layouts(*found)
        stages = parse_layout(text, 13, 1)
        assert len(stages) == pipeline * virtual
        assert all(each.layers for each in stages[:-1])
        again, options = placed(model, split, train(model).options, stages)
        np.testing.assert_array_equal(given(options.splits).contents[1], given(found[0].options.splits).contents[1])
        assert again.split.tolist() == [1.0]


@pytest.mark.parametrize(("early", "text"), [(False, "Et*3|t|t|(tt|)*28mL"), (True, "Ett|(tt|)*29tm|L")])
def test_multi_token_prediction_leaves_a_stage_to_the_loss_where_that_is_faster(early: bool, text: str) -> None:
    work = train(public("deepseek-ai/DeepSeek-V3"), transformer_engine=True)
    work = dataclasses.replace(work, options=dataclasses.replace(work.options, early_mtp=early))
    split = layout(pipeline=32, data=8, expert=8, microbatches=64)
    assert layouts(*derived(work, split, costs(1e15))) == [text]


@pytest.mark.parametrize(
    ("version", "since"), [("0.12.0", None), ("0.13.0", None), ("0.14.0", "mL"), ("0.15.2", "mL"), ("0.16.0", "m|L")]
)
def test_a_release_refuses_layouts_with_multi_token_prediction_that_it_does_not_support(
    version: str, since: str | None
) -> None:
    model = dataclasses.replace(tasks.DENSE, num_layers=3, mtp_num_layers=1)
    for end in ("mL", "m|L"):
        task = tasks.task(model, settings={LAYOUT: f"Et|tt{end}"}, engine_version=version)
        if since is not None and len(end) <= len(since):
            options(task)
        else:
            with pytest.raises(SpecError, match="multi-token prediction"):
                options(task)


def test_a_split_that_is_no_faster_than_the_even_one_stays_even() -> None:
    work, split = derived(train(dataclasses.replace(DENSE, num_layers=8)), layout(pipeline=[2, 4, 8]), costs())
    assert split.split.tolist() == [0.0, 0.0, 0.0]
    assert layouts(work, split) == ["", "", ""]


@pytest.mark.parametrize(("leading", "pipeline"), [(5, 4), (7, 2), (7, 4)])
def test_candidates_whose_leading_layers_leave_no_other_split_stay_even(leading: int, pipeline: int) -> None:
    model = dataclasses.replace(EXPERTS, num_layers=8, moe_first_dense_layers=leading)
    work, split = derived(train(model), layout(pipeline=pipeline, virtual=2), costs())
    assert (split.split.tolist(), layouts(work, split)) == ([0.0], [""])


@pytest.mark.parametrize(
    ("chunks", "text"),
    [([1, 1], "Et|tL"), ([4, *[4] * 14, 1], "Et*4|(t*4|)*14tL"), ([2, 3, 3, 2, 0], "Ett|t*3|t*3|tt|L")],
)
def test_equal_stages_of_a_layout_are_written_once(chunks: list[int], text: str) -> None:
    assert layout_text(chunks, 0) == text
    assert [each.layers for each in parse_layout(text, sum(chunks), 0)] == chunks


def test_virtual_stages_without_dense_layers_and_loss_differ_by_at_most_one_layer() -> None:
    assert chunk_layers([5, 5, 2], [3, 0, 0], 2) == [3, 3, 2, 2, 2, 0]
    assert chunk_layers([4, 5, 4], [1, 2, 0], 2) == [1, 3, 3, 3, 2, 1]


def test_layers_that_divide_over_no_pipeline_are_candidates_without_a_setting() -> None:
    task = tasks.task(dataclasses.replace(tasks.DENSE, num_layers=7), devices=4)
    columns = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task)).columns()
    assert set(columns[PP].tolist()) == {1, 2, 4}
    assert (columns[SPLIT][columns[PP] == 1] == 0).all()
    assert (columns[SPLIT][columns[PP] > 1] == 1).all()


@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ({LAYOUT: "Ettt|ttttL"}, None),
        ({"num_layers_in_last_pipeline_stage": 3}, None),
        ({"account_for_loss_in_pipeline_split": True}, None),
        ({"pipeline_schedule": "zb-h1"}, None),
        ({}, "0.12.0"),
    ],
)
def test_a_split_that_is_given_or_that_the_release_cannot_have_is_not_derived(
    settings: dict[str, Any], version: str | None
) -> None:
    model = dataclasses.replace(tasks.DENSE, num_layers=7)
    task = tasks.task(model, devices=2, settings=settings, engine_version=version)
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    assert set(space.columns()[SPLIT].tolist()) == {0}


@pytest.mark.costly
def test_a_candidate_has_the_same_split_alone_and_among_others() -> None:
    model = dataclasses.replace(EXPERTS, num_layers=13, moe_first_dense_layers=1)
    task = tasks.task(model, devices=8, space={"micro_batch_size": (1,)})
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    costs = tasks.costs(task, 3e9)
    columns = space.columns()
    many, texts = ENGINE.predict(task, columns, costs), layouts(*inputs(task, columns, costs))
    assert any(texts)
    for row in range(0, len(space), 72):
        one = space.columns(np.array([row]))
        assert ENGINE.predict(task, one, costs).step_time_s[0] == pytest.approx(many.step_time_s[row], rel=1e-12)
        assert layouts(*inputs(task, one, costs)) == [texts[row]]
        if texts[row]:  # the layout as a setting is the same job
            fixed = tasks.task(model, devices=8, settings={LAYOUT: texts[row]})
            again = ENGINE.predict(fixed, {**one, SPLIT: np.array([0]), EACH: np.array([0])}, costs)
            assert again.step_time_s[0] == pytest.approx(many.step_time_s[row], rel=1e-9)
            assert again.device_used_bytes[0] == pytest.approx(many.device_used_bytes[row], rel=1e-9)


def test_stages_of_a_derived_split_are_reported() -> None:
    task = tasks.task(dataclasses.replace(tasks.DENSE, num_layers=7), devices=4)
    columns = ENGINE.columns(task, {PP: 4, SPLIT: "balanced"})
    (layers,) = ENGINE.plans.stage_layers(task, columns, tasks.costs(task))
    assert sum(layers) == 7
    assert len(layers) == 4
    assert list(ENGINE.plans.stage_layers(task, ENGINE.columns(task, {PP: 4}), tasks.costs(task))) == []
    assert inputs(task, ENGINE.columns(task, {PP: 4}), tasks.costs(task))[1].split.tolist() == [0.0]
    assert base_inputs(task, columns)[1].split.tolist() == [0.0]


TEXTS = {
    "Et*4|(t*4|)*14tmL": (61, 1, 16),
    "Et|(tt|)*30L": (61, 0, 32),
    "E|t*3|(tt|t|)*2,t|mL": (10, 1, 8),
    "EtttL": (3, 0, 1),
    "E t|t L": (2, 0, 2),
    "Et*2||t|L": (3, 0, 4),
}


@pytest.mark.together("megatron-core, imported")
@pytest.mark.parametrize("text", TEXTS)
def test_a_layout_has_all_layers(text: str) -> None:
    layers, mtp, stages = TEXTS[text]
    found = parse_layout(text, layers, mtp)
    assert len(found) == stages
    assert [sum(getattr(stage, name) for stage in found) for name in ("layers", "mtp")] == [layers, mtp]
    assert (found[0].embedding, found[-1].loss) == (1, 1)


@pytest.mark.together("megatron-core, imported")
@pytest.mark.long
@pytest.mark.parametrize("text", TEXTS)
def test_layout_is_read_as_megatron_reads_it(text: str) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    layers, mtp, _ = TEXTS[text]
    theirs = layouts.PipelineParallelLayerLayout.parse_str_to_list(text.replace(" ", ""))
    actual = parse_layout(text, layers, mtp)
    for each, held in zip(actual, theirs, strict=True):
        names = [kind.name for kind in held]
        expected = [names.count(name) for name in ("embedding", "decoder", "mtp", "loss")]
        assert [each.embedding, each.layers, each.mtp, each.loss] == expected


@pytest.mark.together("megatron-core, imported")
@pytest.mark.parametrize(
    ("text", "layers", "mtp", "problem"),
    [
        ("tEt|tL", 3, 0, "begin with the only E"),
        ("Et|tt", 3, 0, "end with the only L"),
        ("Et|EtL", 2, 0, "only E"),
        ("Et|tL", 3, 0, "num_layers is 3"),
        ("Et|tL", 2, 1, "mtp_num_layers is 1"),
        ("Et|mtL", 2, 1, "after the last t"),
        ("Et|tm|mL", 2, 2, "on one stage"),
        ("Et|xL", 1, 0, "'x'"),
        ("", 1, 0, "begin"),
        ("E(t|)*999999999L", 1, 0, "too long"),
        ("Et*99999999999999999999L", 1, 0, "too long"),
    ],
)
def test_an_invalid_layout_is_refused(text: str, layers: int, mtp: int, problem: str) -> None:
    with refuses(f"train.settings.{LAYOUT}", match=problem):
        parse_layout(text, layers, mtp)


@pytest.mark.together("megatron-core, imported")
@pytest.mark.parametrize(
    ("layers", "stages", "settings"),
    [
        (32, 8, {}),
        (126, 64, {EMBEDDING: True, LOSS: True}),
        (94, 8, {EMBEDDING: True, LOSS: True}),
        (22, 8, {EMBEDDING: True, LOSS: True}),
        (27, 4, {LOSS: True}),
        (61, 2, {LOSS: True}),
        (61, 16, {LAYOUT: [4] * 15 + [1]}),
        (61, 8, {LAYOUT: [8] * 7 + [5]}),
        (61, 32, {LAYOUT: [1, *[2] * 30, 0]}),
        (5, 8, {}),
    ],
)
def test_published_runs_split_by_one_rule(layers: int, stages: int, settings: dict[str, object]) -> None:
    found = published_split(dataclasses.replace(tasks.DENSE, num_layers=layers), stages)
    assert set(found) == set(settings)
    if LAYOUT in found:
        assert [stage.layers for stage in parse_layout(str(found[LAYOUT]), layers, 0)] == settings[LAYOUT]


@pytest.mark.together("megatron-core, imported")
def test_split_puts_multi_token_prediction_on_the_last_stage() -> None:
    text = str(published_split(dataclasses.replace(tasks.DENSE, num_layers=61, mtp_num_layers=1), 16)[LAYOUT])
    assert parse_layout(text, 61, 1) == parse_layout("Et*4|(t*4|)*14tmL", 61, 1)


@pytest.mark.together("megatron-core, imported")
@pytest.mark.parametrize("layers", [5, 33, 61, 94])
def test_most_even_split_is_complete_and_no_stage_is_larger_than_it_must_be(layers: int) -> None:
    for stages in range(2, 70):
        split = even_split(layers, stages)
        assert (sum(split), len(split), max(split)) == (layers, stages, -(-layers // stages))
        assert min(split) >= 0
        assert len(set(split[1:-1])) <= 2
