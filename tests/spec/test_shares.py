"""Knobs that are shares: numbers between 0 and 1 in a spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagcore.errors import SpecError
from flagcore.spec import read_spec
from tests.small import ENGINES

TEXT = """
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 100}
serve: {engine: vllm}
auto_tuner: {space: {gpu_memory_utilization: [SHARE, 0.95]}}
"""


def test_a_share_of_memory_may_be_searched(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(TEXT.replace("SHARE", "0.9"))
    assert read_spec(file, ENGINES).space["gpu_memory_utilization"] == (0.9, 0.95)


def test_a_number_outside_0_to_1_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(TEXT.replace("SHARE", "1.5"))
    with pytest.raises(SpecError, match="gpu_memory_utilization"):
        read_spec(file, ENGINES)
