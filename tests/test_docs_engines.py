"""The page of engines has every knob with its flag, every rule and every counter, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flagcore.engines.serving.llamacpp import knobs as llama_knobs
from flagcore.engines.serving.llamacpp import reading as llama_reading
from flagcore.engines.serving.llamacpp.profile import ENGINE as LLAMACPP
from flagcore.engines.serving.profile.contract import Engine
from flagcore.engines.serving.sglang import knobs as sglang_knobs
from flagcore.engines.serving.sglang import reading as sglang_reading
from flagcore.engines.serving.sglang.profile import ENGINE as SGLANG
from flagcore.engines.serving.vllm import knobs as vllm_knobs
from flagcore.engines.serving.vllm import reading as vllm_reading
from flagcore.engines.serving.vllm.profile import ENGINE as VLLM
from tests.engines.serving.profile.tasks import serving
from tests.small import EXPERTS

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text(encoding="utf-8")
ENGINES = [("vLLM", VLLM, vllm_knobs.KNOBS), ("SGLang", SGLANG, sglang_knobs.KNOBS)]
ENGINES += [("llama.cpp", LLAMACPP, llama_knobs.KNOBS)]
FEW = {
    "vllm": {},
    "sglang": {"attention_backend": "flashmla"},
    "llamacpp": {"ctx_size": 4096},
}
"""Flags that activate further rules."""


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(("name", "engine", "knobs"), ENGINES)
def test_every_knob_of_an_engine_is_on_the_page_with_its_flag_and_values(name: str, engine: Engine, knobs: Any) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \| .+ \|$", section(name), re.MULTILINE)
    assert [row[0] for row in rows] == [knob.name for knob in knobs]
    for knob, (_, flag, values) in zip(knobs, rows, strict=True):
        spelt = knob.off if knob.neutral is True else knob.flags
        assert flag == (f"`--{spelt[0]}`" if spelt else "–")
        assert all(word in values for word in knob.words)


@pytest.mark.parametrize(("name", "engine", "knobs"), ENGINES)
def test_every_rule_of_an_engine_is_on_the_page(name: str, engine: Engine, knobs: Any) -> None:
    given = {"model": EXPERTS, "weights": "w", "command": ("/bin/echo",), "engine_args": FEW[engine.name]}
    tasks = [serving(engine.name, **given), serving(engine.name, on_cores=True, devices=2, **given)]
    names = {rule.name for task in tasks for rule in engine.rules(task)}
    positive = {f"{knob.name}_positive" for knob in knobs}
    text = section("Rules of all engines") + section(name)
    listed = set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.MULTILINE))
    assert listed - {"KNOB_positive"} == names - positive
    assert "KNOB_positive" in listed


def test_every_counter_is_on_the_page_with_its_engines() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| .+ \|$", section("Counters"), re.MULTILINE)
    listed = {(name, engine) for names, of in rows for name in re.findall(r"\w+", names) for engine in of.split(", ")}
    readings = {"vLLM": vllm_reading, "SGLang": sglang_reading, "llama.cpp": llama_reading}
    assert listed == {(name, engine) for engine, reading in readings.items() for name in reading.COUNTERS.values()}
