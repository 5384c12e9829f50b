"""FlagScale's names of serving engines, their knobs and flags, and the lists of `tables.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from flagcore.engines.serving.llamacpp.knobs import KNOBS as LLAMACPP
from flagcore.engines.serving.sglang.knobs import KNOBS as SGLANG
from flagcore.engines.serving.vllm.knobs import KNOBS as VLLM

TABLES: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("tables.yaml").read_text(encoding="utf-8"))
ENGINES = {"vllm": "vllm", "sglang": "sglang", "llama_cpp": "llamacpp", "llamacpp": "llamacpp"}
"""flagcore's name of each engine that FlagScale names."""
DEFAULT_ENGINES = ("vllm", "llama_cpp")
"""The engines that FlagScale tries if a tree names none."""
KNOBS = {
    engine: frozenset(knob.name for knob in knobs)
    for engine, knobs in (("vllm", VLLM), ("sglang", SGLANG), ("llamacpp", LLAMACPP))
}
"""The knobs of each engine."""
OWN_SPACE: dict[str, dict[str, Any]] = TABLES["own_space"]
KNOB_NAMES = {"instance": "instances", "instace": "instances"}
"""Other names of knobs in FlagScale's spaces; the second one is a typo in its space of SGLang."""
COMMON: dict[str, dict[str, str]] = TABLES["common_arguments"]
AS_KNOBS: dict[str, str] = TABLES["arguments_as_knobs"]
OWN_ARGUMENTS: dict[str, str] = TABLES["own_arguments"]


def flagscale_name(engine: str) -> str:
    """Return FlagScale's name of one of flagcore's engines."""
    return next(name for name, ours in ENGINES.items() if ours == engine)
