"""FlagScale's names of serving engines, their knobs and flags, and the lists of `tables.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from flagcore.engines.serving.llamacpp.profile import KNOBS as LLAMACPP
from flagcore.engines.serving.sglang.profile import KNOBS as SGLANG
from flagcore.engines.serving.vllm.knobs import KNOBS as VLLM

TABLES: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("tables.yaml").read_text(encoding="utf-8"))
ENGINES = {"vllm": "vllm", "sglang": "sglang", "llama_cpp": "llamacpp", "llamacpp": "llamacpp"}
"""flagcore's names of engines by FlagScale's names."""
DEFAULT_ENGINES = ("vllm", "llama_cpp")
"""The engines of a tree without engines, as in FlagScale."""
KNOBS = {
    engine: frozenset(knob.name for knob in knobs)
    for engine, knobs in (("vllm", VLLM), ("sglang", SGLANG), ("llamacpp", LLAMACPP))
}
"""Names of knobs by engine."""
DEFAULT_SPACE: dict[str, dict[str, Any]] = TABLES["own_space"]
KNOB_NAMES = {"instance": "instances", "instace": "instances"}
"""flagcore's names of knobs in FlagScale's spaces; the second one is a typo in its space for SGLang."""
COMMON_ARGUMENTS: dict[str, dict[str, str]] = TABLES["common_arguments"]
KNOBS_BY_ARGUMENT: dict[str, str] = TABLES["arguments_as_knobs"]
RESERVED_ARGUMENTS: dict[str, str] = TABLES["own_arguments"]


def flagscale_name(engine: str) -> str:
    """Return FlagScale's name for an engine of flagcore."""
    return next(name for name, ours in ENGINES.items() if ours == engine)
