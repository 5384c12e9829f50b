"""LMDeploy, by its own program `lmdeploy serve api_server`: release 0.18, from its documentation and source."""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import engine_args, knobs, program
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.names import DP, EP, TP
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.engine import PORT, Engine, Server
from flagcore.engines.serving.lmdeploy import reading
from flagcore.engines.serving.lmdeploy.knobs import KNOBS, PACKAGE, PROGRAM, parse_args, settings, version_of
from flagcore.engines.serving.lmdeploy.rules import merges, rules
from flagcore.engines.serving.load.result import GENERATE


def _ready(spec: Spec) -> None:
    check_directory(spec)
    command = program.found(spec, PROGRAM)
    program.check_version(spec, program.package_version(command[0], PACKAGE))
    parse_args(spec)


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec, data = task.spec, count(values, DP)
    if count(values, EP) == 1:  # without EP, tp counts the devices of all attention groups
        values = {**values, TP: count(values, TP) * data}
    argv = [*program.found(spec, PROGRAM), spec.serve.weights or ""]
    argv += ["--server-name", "127.0.0.1", "--server-port", PORT, "--log-level", "INFO", "--max-log-len", "0"]
    argv += knobs.arguments(KNOBS, values)
    argv += engine_args.written(parse_args(spec).others, negated=False)
    return Server(argv=tuple(argv), environment={"HF_HUB_OFFLINE": "1"})


ENGINE = Engine(
    name="lmdeploy",
    title="LMDeploy",
    modules={PACKAGE: "lmdeploy>=0.18,<0.19"},
    knobs=KNOBS,
    parse_args=parse_args,
    ready=_ready,
    version=version_of,
    rules=rules,
    merges=merges,
    settings=settings,
    server=_server,
    effective=reading.effective,
    memory=reading.memory,
    counters=reading.COUNTERS,
    failures=reading.FAILURES,
    api=GENERATE,  # its completions take text only
    untested="written from its documentation, no trial has run; times are those of its kernels alone",
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
