"""What a person reads, in tables that fit a width: one candidate explained, and compared with another."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from flagcore_llamacpp.profile import KNOBS
from flagcore_megatron.predict import LABELS
from flagcore_megatron.space.knobs import BY_NAME

from flagcore.domain.knob import Effect, Knob
from flagcore.domain.prediction import Labels
from flagcore.domain.records import GIB, read_prediction
from flagcore.report.candidate_report import causes_text, differs_text, largest_differences
from flagcore.report.explanation import memory_parts, needs_text, prediction_text
from flagcore.report.formats import fitted, render, table
from flagcore.report.text import candidate_columns, candidate_text, values_text
from tests.product import tasks

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


def test_without_the_engine_names_are_unchanged() -> None:
    values = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_method": None, "eager": False}
    assert values_text(values, {}) == "tensor_model_parallel_size 2, sequence_parallel"


def test_a_plugins_knob_has_its_label() -> None:
    knobs = {"acme_overlap": Knob(name="acme_overlap", label="overlap", neutral=False, effects={True: Effect()})}
    assert values_text({"acme_overlap": True}, knobs) == "overlap"
    assert candidate_columns([{"candidate": {"acme_overlap": True}}], knobs) == {"overlap": "candidate.acme_overlap"}
    assert differs_text({"acme_overlap": (False, True)}, knobs) == "overlap off -> on"


def test_each_format_has_the_same_figures() -> None:
    records = [{"id": "x", "time": {"s": 0.123456789}}]
    columns = {"id": "id", "s": "time.s"}
    assert "0.123456789" in render(records, "json", columns)
    assert render(records, "jsonl", columns) == '{"id": "x", "time": {"s": 0.123456789}}'
    assert render(records, "csv", columns) == "id,s\nx,0.123456789"
    assert "s: 0.123456789" in render(records, "yaml", columns)
    assert "0.1235" in render(records, "table", columns)


HEADINGS = ["trial", "configuration", "tokens/s per device", "reason"]
ROWS = [
    ["0 baseline", "DP 2, MBS 1, recompute full uniform 1, dist-opt", "12,345,678", "-"],
    ["1", "TP 2, MBS 16", "-", "it ran out of memory: tried to allocate 20 GiB on a device that has 16"],
]


@pytest.mark.parametrize("width", [120, 100, 80, 72])
def test_table_fits_and_keeps_every_word_and_figure(width: int) -> None:
    with fitted(width):
        text = table(HEADINGS, ROWS)
    assert max(map(len, text.splitlines())) <= width
    assert "12,345,678" in text
    words = [word for row in (HEADINGS, *ROWS) for cell in row for word in cell.split()]
    assert sorted([word for word in text.split() if set(word) != {"-"} or word == "-"]) == sorted(words)


def test_figures_are_never_cut_however_narrow_the_terminal() -> None:
    figures = [["123,456,789.5", "~0.12345", "1,000"]]
    with fitted(10):
        lines = table(["a", "b", "c"], figures).splitlines()
    assert [line for line in lines if "123" in line] == ["123,456,789.5  ~0.12345", "123,456,789.5  1,000"]


def test_columns_without_room_are_printed_below_with_the_first_one() -> None:
    headings = ["chip", *(f"figure {place}" for place in range(8))]
    rows = [[chip, *(f"{place}{place},000.5" for place in range(8))] for chip in ("one", "two")]
    for width in (30, 40, 60, 80):
        with fitted(width):
            parts = table(headings, rows).split("\n\n")
        assert len(parts) > 1
        assert all(part.startswith("chip") for part in parts)
        assert max(len(line) for part in parts for line in part.splitlines()) <= width
        for row in rows:
            cells_by_row = [line.split()[1:] for part in parts for line in part.splitlines() if line.startswith(row[0])]
            assert list(chain.from_iterable(cells_by_row)) == row[1:]


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


def test_the_memory_table_adds_up_to_the_peak() -> None:
    components = {"embedding": {"params": 1e6, "weights_gib": 3.0, "optimizer_gib": 5.0, "activation_gib": 4.0}}
    for peak, rest in ((12.0, "0.000"), (11.75, "-0.250"), (14.5, "2.500")):
        memory = RECORD["memory"] | {"components": components, "peak_allocated_gib": peak}
        rows = [line.split() for line in prediction_text(RECORD | {"memory": memory}, LABELS).splitlines()]
        assert ["other", "0", "0.000", "0.000", rest] in rows
        assert ["Total", "1,000,000", "3.000", "5.000", f"{peak - 8:.3f}"] in rows


SERVED: dict[str, Any] = {
    "output_tokens_per_s": 1500.0,
    "ttft_s": {"mean": 0.1, "p50": 0.09, "p90": 0.2, "p99": 0.3},
    "objective": {"value": 1500.0, "low": 1000.0, "high": 1800.0},
    "time": {"queue_s": 0.5, "prefill_s": 0.25, "decode_s": 0.25, "collectives_s": 0.0, "host_s": 0.0},
    "memory": {
        "fits": True,
        "capacity_gib": 80.0,
        "static_gib": 60.0,
        "activation_gib": 2.0,
        "device_used_gib": 70.0,
        "kv_cache_gib": 40.0,
        "kv_cache_tokens": 320000.0,
    },
}


def test_a_server_is_described_with_units() -> None:
    text = prediction_text(SERVED, Labels())
    assert "~1,500 output tokens/s" in text
    assert "Mean time of a request: ~1 s" in text
    assert ["queue", "0.5", "50.0%", "waiting"] in [line.split()[:4] for line in text.splitlines()]
    assert "weights ~20.00, activations and graphs ~2.00, KV cache (320,000 tokens" in text
    assert "~70.00 / 80.00 GiB (fits)" in text
    assert "{" not in text
    assert "_s" not in text


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


def test_parts_of_memory_add_up_for_training_and_for_servers() -> None:
    training = {
        "static_gib": 6.0,
        "activation_gib": 2.0,
        "peak_allocated_gib": 8.5,
        "reserved_gib": 9.0,
        "device_used_gib": 10.0,
        "capacity_gib": 8.0,
        "worst_stage": 3,
        "components": {"ffn": {"params": 1.0, "weights_gib": 2.0, "optimizer_gib": 3.5, "activation_gib": 2.0}},
    }
    found = read_prediction({"memory": training})
    parts = memory_parts(found)
    assert sum(parts.values()) == 10.0 * GIB
    assert parts["other states"] == 0.5 * GIB
    text = needs_text(found)
    assert all(each in text for each in ("10.00 / 8.00 GiB", "stage 3: weights 2.00, "))
    server = replace(found, components={}, figures={"kv_cache_bytes": 4.0 * GIB})
    assert sum(memory_parts(server).values()) == 10.0 * GIB
    assert memory_parts(server)["weights"] == 2.0 * GIB
    assert "stage" not in needs_text(server)


STEP = "tokens_per_second_per_device"
TIME = {"compute_s": (1.0, 0.7), "tp_comm_s": (0.5, 0.1), "pp_bubble_s": (0.0, 0.2)}


def text(
    seconds: tuple[float, float], predicted: tuple[float | None, float], objective: str = STEP, **more: bool
) -> str:
    """Return the causes of a time, with TIME as the parts of the predictions."""
    times = [{part: pair[place] for part, pair in TIME.items()} for place in (0, 1)]
    before, after = (replace(tasks.prediction(**t), step_time_s=s) for t, s in zip(times, predicted, strict=True))
    return causes_text(objective, "the baseline", seconds, (before, after), "measured", **more)


def test_only_parts_with_the_sign_of_the_total_are_causes_the_largest_first() -> None:
    assert largest_differences(TIME) == {"tp_comm_s": pytest.approx(-0.4), "compute_s": pytest.approx(-0.3)}
    assert largest_differences({"compute_s": (1.0, 1.0)}) == {}


def test_the_parts_are_listed_only_if_the_prediction_has_the_sign_of_the_measurement() -> None:
    faster = text((1.6, 1.2), (1.5, 1.0))
    assert "-25.0%" in faster
    assert "-0.4 s" in faster
    assert faster.index("-0.4 s") < faster.index("-0.3 s")
    assert "-0.4 s" not in text((1.2, 1.6), (1.5, 1.0))
    assert "-0.4 s" not in text((1.6, 1.2), (None, 1.0))


@pytest.mark.parametrize("objective", [STEP, "output_tokens_per_s"])
def test_the_speedup_of_rounds_is_the_only_one(objective: str) -> None:
    causes = text((1.6, 1.2), (1.5, 1.0), objective, has_rounds=True)
    assert causes.count("%") == 1
    assert "125%" in causes  # of the measured difference is predicted
    assert "-0.4 s" in causes


def test_a_rate_is_compared_as_a_rate() -> None:
    assert "+100.0%" in text((0.5, 0.25), (0.5, 0.25), "output_tokens_per_s")
    assert "-50.0%" in text((0.5, 0.25), (0.5, 0.25), "ttft_s.p99")
