"""What a person reads."""

from __future__ import annotations

import pytest

from flagcore.report.formats import render, table
from flagcore.report.text import candidate_text, values_text
from tests import small


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
def test_a_candidate_is_told_by_what_it_turns_on(values: dict[str, object], text: str) -> None:
    assert candidate_text(small.candidate(**values)) == text  # type: ignore[arg-type]


def test_a_flag_that_engines_set_by_themselves_is_told_where_it_is_off() -> None:
    usual = {"instances": 1, "parallel": 8, "n_gpu_layers": -1, "enable_prefix_caching": True}
    assert values_text(usual) == "parallel 8"
    assert values_text({"instances": 1}) == "engine defaults"
    assert values_text({"instances": 2, "enable_prefix_caching": False}) == "instances 2, no prefix caching"


def test_figures_in_a_table_stand_to_the_right_and_words_to_the_left() -> None:
    assert table(["name", "n"], [["a", "1"], ["bb", "1,000"]]).splitlines() == [
        "name      n",
        "----  -----",
        "a         1",
        "bb    1,000",
    ]


def test_each_format_holds_the_same_figures() -> None:
    records = [{"id": "x", "time": {"s": 0.123456789}}]
    columns = {"id": "id", "s": "time.s"}
    assert "0.123456789" in render(records, "json", columns)
    assert render(records, "jsonl", columns) == '{"id": "x", "time": {"s": 0.123456789}}'
    assert render(records, "csv", columns) == "id,s\nx,0.123456789"
    assert "s: 0.123456789" in render(records, "yaml", columns)
    assert "0.1235" in render(records, "table", columns)
