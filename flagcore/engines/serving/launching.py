"""How a candidate is started: the trial program with a job, or, for real, its servers as users reach them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.secrets import secrets_in_arguments
from flagcore.domain.spec import Spec
from flagcore.engines.serving import export
from flagcore.engines.serving.common.heterogeneous import Seat, seats
from flagcore.engines.serving.common.place import Place
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.load.traffic import in_flight, traffic
from flagcore.engines.serving.trial.job import SERVE, Instance, Job, as_text
from flagcore.errors import LaunchError, SpecError

PROGRAM = "flagcore.engines.serving.trial"


def ready(spec: Spec, engine: Engine) -> None:
    """Raise SpecError or NoDevice unless servers of `spec` can be started and loaded here."""
    serve, cluster = spec.serve, spec.cluster
    if cluster.groups:
        chips, problem = [group.chip for group in cluster.groups], "are more kinds of chips than one machine has"
        fix = "plan with `flag estimate`"
        raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)
    if cluster.nodes > 1:
        problem, fix = (
            "is more than the one machine on which servers are started",
            "use 1, or plan with `flag estimate`",
        )
        raise SpecError(key="cluster.nodes", value=cluster.nodes, problem=problem, fix=fix)
    for load in serve.loads:
        traffic(in_flight(load))
    if serve.directory is not None and not Path(serve.directory).is_dir():
        problem, fix = "is no folder, and serve.command starts there", "name one that exists, or leave it out"
        raise SpecError(key="serve.directory", value=serve.directory, problem=problem, fix=fix)
    if spec.objective == "goodput_requests_per_s" and not spec.limits:
        problem, fix = "counts the requests that keep the SLO, and there is none", "give serve.slo"
        raise SpecError(key="auto_tuner.objective", value=spec.objective, problem=problem, fix=fix)
    engine.ready(spec)


def launch(
    platform: Platform, engine: Engine, where: str, candidate: Candidate, folder: str, *, for_real: bool
) -> Launch:
    """Return how to start `candidate`; what it needs is written into `folder`. `where` leads to `engine`.

    Raises LaunchError if that cannot be done.
    """
    instances = _instances(platform, engine, candidate)
    serve = platform.task.spec.serve
    directory = serve.directory or folder
    try:
        if for_real:
            common = {**platform.environment, **platform.task.spec.envs}
            return export.launch(instances, folder, directory, common, engine.health)
        job = Job(
            engine=where,
            instances=instances,
            loads=tuple(in_flight(load) for load in serve.loads),
            vocab_size=platform.task.spec.model.vocab_size,
            timeout_s=platform.task.spec.control.max_time_per_task,
            repeats=serve.repeats,
            client=serve.client,
            report=serve.report,
            slo=serve.slo,
            patterns=platform.failure_patterns,
            directory=directory,
            versions={engine.name: engine.version(platform.task.spec)},
        )
        file = Path(folder, SERVE)
        if any(secrets_in_arguments(argv) for argv in (*(each.argv for each in instances), serve.client or ())):
            file.touch(mode=0o600)
        file.write_text(as_text(job), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from None
    return Launch(argv=(sys.executable, "-m", PROGRAM, folder), folder=folder)


def _told(platform: Platform, engine: Engine, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the knobs that the engine is told of: with a neutral value it chooses itself, and may do so by model."""
    neutral = {axis.knob: axis.neutral for axis in engine.axes(platform.task)}
    return {knob: value for knob, value in values.items() if value not in (None, neutral.get(knob))}


def _instances(platform: Platform, engine: Engine, candidate: Candidate) -> tuple[Instance, ...]:
    """Return all servers of a candidate, each with devices or cores of its own."""
    return tuple(_placed(platform, engine, seat) for seat in seats(platform.task, candidate.as_dict()))


def _placed(platform: Platform, engine: Engine, seat: Seat) -> Instance:
    """Return a server that sees the devices of its seat. What the user sets goes before what an engine sets."""
    task, variable = platform.task, platform.support.visible_devices
    cores = Place.of(task).cores(seat.first, seat.width)
    server = engine.server(task, seat.values, cores)
    environment = {name: value for name, value in server.environment.items() if name not in task.spec.envs}
    if variable is not None:
        environment[variable] = ",".join(_visible(platform, variable)[seat.first : seat.first + seat.width])
    asked = _told(platform, engine, seat.values)
    return Instance(argv=server.argv, environment=environment, cores=cores, asked=asked)


def _visible(platform: Platform, variable: str) -> list[str]:
    """Return the names of the devices that this process may use, in order: what is visible to it, or all of a node."""
    given = platform.task.spec.envs.get(variable) or os.environ.get(variable)
    if given:
        return [word.strip() for word in given.split(",")]
    return [str(index) for index in range(platform.task.cluster.groups[0].devices_per_node)]
