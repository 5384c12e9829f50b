"""LMDeploy, by its own program `lmdeploy serve api_server`: release 0.18, from its documentation and source.

No server was run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flagcore.contracts import Workload
from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.adapter import Serving
from flagcore.engines.serving.common import knobs, metrics
from flagcore.engines.serving.common.command_line import written
from flagcore.engines.serving.common.hardware import DP, EP, TP
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.engine import PORT, Engine, Fetch, Server
from flagcore.engines.serving.lmdeploy import knobs as own
from flagcore.engines.serving.lmdeploy.rules import merges, rules
from flagcore.engines.serving.load.result import GENERATE


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    spec, data = task.spec, count(values, DP)
    if count(values, EP) == 1:  # without EP, tp counts the devices of all attention groups
        values = {**values, TP: count(values, TP) * data}
    argv = [*own.COMMAND_LINE.command(spec), spec.serve.weights or ""]
    argv += ["--server-name", "127.0.0.1", "--server-port", PORT, "--log-level", "INFO", "--max-log-len", "0"]
    argv += knobs.arguments(own.KNOBS, values)
    argv += written(own.COMMAND_LINE.parse(spec).others, negated=False)
    return Server(argv=tuple(argv), environment={"HF_HUB_OFFLINE": "1"})


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return what the log reports of the engine that was chosen."""
    for backend, line in (("pytorch", "Building CacheEngine with config"), ("turbomind", "turbomind engine config")):
        if line in log:
            return {own.BACKEND: backend, **metrics.settings(log, own.FILE.settings)}
    return {}


def memory(log: str) -> dict[str, float]:
    """Return the size of the cache, which TurboMind logs in MB and the PyTorch engine in blocks."""
    if blocks := re.search(r"CacheConfig\(.*\bblock_size=(\d+).*\bnum_gpu_blocks=(\d+)", log):
        return {"kv_cache_tokens": float(blocks[1]) * float(blocks[2])}
    return metrics.largest(log, {"kv_cache_gib": r"Object cache budget: ([\d.]+) MB"}, 1 / 1024)


ENGINE = Engine(
    name="lmdeploy",
    title="LMDeploy",
    modules={"lmdeploy": "lmdeploy>=0.18,<0.19"},
    knobs=own.KNOBS,
    parse_args=own.COMMAND_LINE.parse,
    ready=own.COMMAND_LINE.ready,
    version=own.COMMAND_LINE.version,
    rules=rules,
    merges=merges,
    settings=own.settings,
    server=_server,
    effective=effective,
    memory=memory,
    counters=own.FILE.counters,
    failures=own.FILE.failures,
    api=GENERATE,  # its completions take text only
    untested="written from its documentation, no trial has run; times are those of its kernels alone",
)
WORKLOAD: Workload = Serving(ENGINE, f"{__name__}:ENGINE")
