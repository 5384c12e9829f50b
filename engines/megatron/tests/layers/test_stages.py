"""Layouts of pipeline stages: Megatron's own grammar, and how published runs dealt out layers that do not divide."""

import dataclasses

import pytest
from flagcore_megatron.space.stages import EMBEDDING, LAYOUT, LOSS, even_split, parse_layout, published_split

from tests.checks import refuses
from tests.product import tasks

pytestmark = pytest.mark.together("megatron-core, imported")

TEXTS = {
    "Et*4|(t*4|)*14tmL": (61, 1, 16),
    "Et|(tt|)*30L": (61, 0, 32),
    "E|t*3|(tt|t|)*2,t|mL": (10, 1, 8),
    "EtttL": (3, 0, 1),
    "E t|t L": (2, 0, 2),
    "Et*2||t|L": (3, 0, 4),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_layout_has_all_layers(text: str) -> None:
    layers, mtp, stages = TEXTS[text]
    found = parse_layout(text, layers, mtp)
    assert len(found) == stages
    assert [sum(getattr(stage, name) for stage in found) for name in ("layers", "mtp")] == [layers, mtp]
    assert (found[0].embedding, found[-1].loss) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("text", TEXTS)
def test_layout_is_read_as_megatron_reads_it(text: str) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    layers, mtp, _ = TEXTS[text]
    theirs = layouts.PipelineParallelLayerLayout.parse_str_to_list(text.replace(" ", ""))
    actual = parse_layout(text, layers, mtp)
    for stage, held in zip(actual, theirs, strict=True):
        names = [kind.name for kind in held]
        expected = [names.count(name) for name in ("embedding", "decoder", "mtp", "loss")]
        assert [stage.embedding, stage.layers, stage.mtp, stage.loss] == expected


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


def test_split_puts_multi_token_prediction_on_the_last_stage() -> None:
    text = str(published_split(dataclasses.replace(tasks.DENSE, num_layers=61, mtp_num_layers=1), 16)[LAYOUT])
    assert parse_layout(text, 61, 1) == parse_layout("Et*4|(t*4|)*14tmL", 61, 1)


@pytest.mark.parametrize("layers", [5, 33, 61, 94])
def test_most_even_split_is_complete_and_no_stage_is_larger_than_it_must_be(layers: int) -> None:
    for stages in range(2, 70):
        split = even_split(layers, stages)
        assert (sum(split), len(split), max(split)) == (layers, stages, -(-layers // stages))
        assert min(split) >= 0
        assert len(set(split[1:-1])) <= 2
