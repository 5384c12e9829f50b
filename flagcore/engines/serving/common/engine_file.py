"""Reads `engine.yaml` beside an engine's profile: flags, counters and log lines of the engine, and its overheads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.common.command_line import RESERVED
from flagcore.engines.serving.model.work import Overheads, Releases

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """The content of the file.

    `settings` are regular expressions by knob, whose only group is the value in use; the first that matches counts.
    `memory` are the same for figures of memory, whose largest match counts. `block_sizes` are those of attention
    backends that take only some. The rest is described at `CommandLine` and `Engine`.
    """

    reserved: Mapping[str, str]
    counters: Mapping[str, str]
    settings: Mapping[str, list[str]]
    memory: Mapping[str, str]
    failures: tuple[FailurePattern, ...]
    overheads: Releases
    block_sizes: Mapping[str, list[int]]


def read_engine_file(package: str) -> EngineFile:
    """Return the content of the file of an engine's package."""
    data = yaml.load(files(package).joinpath("engine.yaml").read_text("utf-8"), _Loader)
    return EngineFile(
        reserved=RESERVED | data["reserved"],
        counters=data["counters"],
        settings=data.get("settings", {}),
        memory=data.get("memory", {}),
        failures=tuple(
            FailurePattern(pattern="|".join(row["lines"]), state=TrialState(row["state"]), advice=row.get("advice", ""))
            for row in data["failures"]
        ),
        overheads={since: Overheads(**values) for since, values in data.get("overheads", {}).items()},
        block_sizes=data.get("block_sizes", {}),
    )
