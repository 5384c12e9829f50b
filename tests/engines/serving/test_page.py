"""docs/serving.md: its names are those of the programs, and its examples are what they say."""

from pathlib import Path

import pytest

from flagcore.api.inputs import read_spec
from flagcore.engines.results import METRICS
from flagcore.engines.serving.launch.export import FRONT_PORT, NGINX, START
from flagcore.engines.serving.launch.server import SERVE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serving.md").read_text()
EXAMPLES = ["serve-cpu.yaml", "serve-vllm-cpu.yaml"]


def test_file_and_port_flags_are_reserved_for_the_program() -> None:
    assert all(f"`{name}`" in PAGE for name in (SERVE, METRICS, START, NGINX))
    assert f"port {FRONT_PORT}" in PAGE


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_varies_at_least_four_knobs(name: str) -> None:
    spec = read_spec(ROOT / "examples" / name)
    assert sum(len(values) > 1 for values in spec.space.values()) >= 4
    assert spec.control.max_trials >= 8
