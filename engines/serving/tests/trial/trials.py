"""Trials of a server that tests play, in this process or through the launcher and the real trial program."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_serving.job import Load
from flagcore_serving.launch.server import read_job
from flagcore_serving.trial import __main__ as program
from flagcore_serving.trial.failures import TrialFailure

from engines.serving.tests.engines.tasks import serving
from flagcore.contracts import Platform
from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import Control
from flagcore.domain.trial import Role, TimeLimit, Trial, TrialState
from flagcore.launchers.local import LAUNCHER
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure, stop_above_s
from tests.product.tasks import platform as small_platform

SERVER = Path(__file__).with_name("server.py")
LOAD = Load(input_len=16, output_len=8, num_prompts=8, concurrency=4)


def platform(folder: Path, behaviour: str, *, seconds: float = 60.0, **arguments: Any) -> Platform:
    """Two cores on each node, on which `behaviour` serves. `arguments`: as in `serving`."""
    weights = folder / "weights.gguf"
    weights.touch()
    command: dict[str, Any] = {"command": (sys.executable, str(SERVER), behaviour), "directory": str(folder)}
    command["weights"] = str(weights)
    command |= {
        "control": Control(max_time_per_task=seconds, answers=None),
        "objective": "output_tokens_per_s",
        "loads": (LOAD,),
    }
    task = serving("llamacpp", devices=2, on_cores=True, **{**command, **arguments})
    support = EngineSupport(support=Support.YES, device_type="cpu", distributed_backend="gloo", shared_devices=True)
    return dataclasses.replace(small_platform(task), support=support)


def candidate(where: Platform, **values: KnobValue) -> Candidate:
    """The engine's defaults but for `values`."""
    return Candidate.of({**LLAMACPP.defaults(where.task), **values})


def trial_folder(folder: Path) -> Path:
    created = folder / "trial"
    created.mkdir(exist_ok=True)
    return created


def run(where: Platform, folder: Path, best: Trial | None = None, **values: KnobValue) -> Trial:
    """Launch and measure one candidate, as the loop does."""
    requested, folder_ = candidate(where, **values), str(trial_folder(folder))
    trial = Trial(number=0, candidate=requested, role=Role.SEARCH, state=TrialState.RUNNING)
    limit = TimeLimit(seconds=where.task.spec.control.max_time_per_task or 300.0, because="test")
    running = launch(where, LAUNCHER, requested, folder_, limit, stop_above_s=stop_above_s(best))
    return measure(running, where, trial, folder_, best)


def run_here(where: Platform, folder: Path, **values: KnobValue) -> Trial:
    """Run one candidate in this process, which takes less time than a trial program of its own."""
    requested, folder_ = candidate(where, **values), trial_folder(folder)
    LLAMACPP.launch(where, requested, str(folder_))
    trial = Trial(number=0, candidate=requested, role=Role.SEARCH, state=TrialState.RUNNING)
    try:
        program.run(read_job(folder_), folder_)
    except TrialFailure as failure:
        return dataclasses.replace(trial, state=failure.state, reason=str(failure))
    measurement = LLAMACPP.read(where.task, requested, str(folder_))
    return dataclasses.replace(trial, state=TrialState.MEASURED, measurement=measurement)


def requests_sent(folder: Path) -> list[dict[str, Any]]:
    """The requests that the servers received, in order."""
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def servers(folder: Path) -> list[dict[str, Any]]:
    """The environment, the cores and the process of each server that was started."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("environment-*.json"))]
