"""Bars between the stages of a hybrid pattern: read, placed for a candidate, and written into a launch."""

import dataclasses
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from flagcore_megatron import start
from flagcore_megatron.layers.fastest import split_layers, virtual_stages
from flagcore_megatron.space import production
from flagcore_megatron.space.stages import pattern_stages, pattern_text, stages_with
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_training.splits import StageLayers
from flagcore_training.stages import placed
from flagcore_training.time.stage import Blocks
from flagcore_training.time.step import costs_in_run, step_time

from engines.models.tests.examples import layer_of
from engines.training.tests.candidates import layout, train
from flagcore.errors import SpecError
from tests.product import tasks

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
