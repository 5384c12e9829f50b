"""Candidates and memory in the words of real engines."""

from typing import Any

import pytest
from flagcore_llamacpp.engine import KNOBS
from flagcore_megatron.predict import LABELS
from flagcore_megatron.space.knobs import BY_NAME

from flagcore.report.candidate_report import differs_text
from flagcore.report.explanation import prediction_text
from flagcore.report.text import candidate_text, values_text
from tests.product import tasks

RECORD: dict[str, Any] = {
    "step_time_s": {"value": 2.0, "low": 1.5, "high": 2.5},
    "tokens_per_second_per_device": {"value": 1234.5, "low": 1.0, "high": 2.0},
    "mfu": 0.5,
    "time": {"compute_s": 1.5, "pp_bubble_s": 0.5},
    "limit": "bubble",
    "memory": {
        "fits": False,
        "capacity_gib": 10.0,
        "static_gib": 8.0,
        "activation_gib": 4.0,
        "peak_allocated_gib": 12.0,
        "reserved_gib": 12.5,
        "device_used_gib": 13.0,
        "worst_stage": 1,
        "components": {
            "output_head": {"params": 1e6, "activation_gib": 1.0},
            "novelty": {"params": 2e6, "activation_gib": 0.5},
            "qkv_proj": {"params": 3e6, "activation_gib": 2.5},
        },
    },
    "model": [
        {"component": "Embedding", "params_per_layer": 1e8, "layers": 1, "params": 1e8},
        {"component": "MLP", "params_per_layer": 2e8, "layers": 3, "params": 6e8},
    ],
}
LLAMACPP = {knob.name: knob for knob in KNOBS}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "MBS 1"),
        ({"data_parallel_size": 2, "micro_batch_size": 8, "use_distributed_optimizer": True}, "DP 2, MBS 8, dist-opt"),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
            "PP 2, MBS 1, layers/virtual stage 1",
        ),
        (
            {
                "use_recompute": True,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            "MBS 1, recompute full block 1",
        ),
        ({"use_recompute": True, "recompute_granularity": "selective"}, "MBS 1, recompute selective"),
    ],
)
def test_a_candidate_is_described_by_its_non_neutral_knobs(values: dict[str, object], text: str) -> None:
    assert candidate_text(tasks.candidate(**values), BY_NAME) == text  # type: ignore[arg-type]


def test_values_that_are_neutral_for_the_engine_are_left_out() -> None:
    usual_values = {"instances": 1, "parallel": 8, "n_gpu_layers": -1, "enable_prefix_caching": True}
    assert values_text(usual_values, LLAMACPP) == "parallel 8"
    assert values_text({"instances": 1}, LLAMACPP) == "engine defaults"
    assert values_text({"instances": 2, "enable_prefix_caching": False}, LLAMACPP) == "instances 2, no prefix caching"


def test_the_memory_table_adds_up_to_the_peak() -> None:
    components = {"embedding": {"params": 1e6, "weights_gib": 3.0, "optimizer_gib": 5.0, "activation_gib": 4.0}}
    for peak, name, rest in ((11.75, "freed before the peak", "-0.250"), (14.5, "temporary", "2.500")):
        memory = RECORD["memory"] | {"components": components, "peak_allocated_gib": peak}
        rows = [line.split() for line in prediction_text(RECORD | {"memory": memory}, LABELS).splitlines()]
        assert [*name.split(), "0", "0.000", "0.000", rest] in rows
        assert ["Total", "1,000,000", "3.000", "5.000", f"{peak - 8:.3f}"] in rows


def test_knobs_of_recompute_are_reported_as_one() -> None:
    flags_on = {
        "use_recompute": (False, True),
        "recompute_granularity": (None, "full"),
        "recompute_method": (None, "block"),
    }
    assert differs_text({"micro_batch_size": (1, 2), **flags_on}, BY_NAME) == "MBS 1 -> 2, recompute off -> full block"
    assert differs_text({knob: pair[::-1] for knob, pair in flags_on.items()}, BY_NAME) == "recompute full block -> off"
    assert differs_text({"recompute_method": ("uniform", "block")}, BY_NAME) == "method uniform -> block"
    assert differs_text({"max_num_seqs": (None, 0), "enforce_eager": (None, False)}, BY_NAME) == (
        "max_num_seqs unset -> 0, enforce_eager unset -> off"
    )
