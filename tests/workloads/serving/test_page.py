"""docs/serving.md: its snippets are specs, its commands exist, and its examples are what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from flagcore.cli.main import COMMANDS
from flagcore.spec import parse_spec, read_spec
from flagcore.workloads.serving.trial.job import METRICS, SERVE
from flagcore.workloads.serving.winner import COMPOSE, FRONT_PORT, NGINX, START

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serving.md").read_text()
EXAMPLES = ["serve-cpu.yaml", "serve-vllm-cpu.yaml"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHAPE = yaml.safe_load((ROOT / "examples" / EXAMPLES[0]).read_text())["model"]
LINES = [line[2:] for language, block in FENCE.findall(PAGE) if language == "console" for line in block.splitlines()]


@pytest.mark.parametrize("block", [block for language, block in FENCE.findall(PAGE) if language == "yaml"])
def test_a_snippet_is_a_spec(block: str) -> None:
    spec = parse_spec({**yaml.safe_load(block), "model": SHAPE}, file="docs/serving.md", base=ROOT)
    assert spec.serve.loads


@pytest.mark.parametrize("line", LINES)
def test_a_command_exists(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "flag":
        assert words[0] in COMMANDS
        assert all((ROOT / word).exists() for word in words if word.endswith(".yaml"))
    elif program == "make":
        assert set(words) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    else:
        assert line == ". .venv/bin/activate"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(examples/[\w./-]+)`", PAGE))))
def test_a_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_names_of_files_and_ports_are_the_programs_own() -> None:
    assert all(f"`{name}`" in PAGE for name in (SERVE, METRICS, START, NGINX, COMPOSE))
    assert f"port {FRONT_PORT}" in PAGE


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_varies_at_least_four_knobs(name: str) -> None:
    spec = read_spec(ROOT / "examples" / name)
    assert sum(len(values) > 1 for values in spec.space.values()) >= 4
    assert spec.control.max_trials >= 8
