"""What the tests of the loop share: made-up devices, launches that end at once, and a bench that tunes a small task."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flagcore_testing import toy

from flagcore.contracts import Engine, Event, Launcher, Strategy
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, Launch
from flagcore.domain.plan import Plan
from flagcore.domain.space import Candidate
from flagcore.domain.spec import ClusterSpec, Control
from flagcore.plugins import LoadedPlugins
from flagcore.tuner.loop import Dependencies, TuneResult, tune
from flagcore.tuner.store import OptunaStore
from flagcore.tuner.strategies import PREDICTED
from tests import tasks

SPACE: dict[str, Any] = {"micro_batch_size": (1, 2, 4), **{name: (value,) for name, value in tasks.PLAIN_SPACE.items()}}
UNTIMED = replace(tasks.CHIP, dense_flops_per_second={}, memory_bandwidth_bytes_per_second=None)
"""A chip of which no rate is known, so that no candidate is ruled out by its predicted time."""


def plugin(chip: Chip = UNTIMED, count: int = 2, *, gib: float = 64, **support: Any) -> SimpleNamespace:
    """A plugin for `count` devices of a chip."""
    answer = EngineSupport(support=Support.YES, device_type="xpu", distributed_backend="gloo", **support)
    found = [Device(index=n, chip="test-chip", memory_bytes=int(gib * 2**30)) for n in range(count)]
    return tasks.plugin(chips=lambda: [chip], devices=lambda: found, engine_support=lambda: answer)


class Ended:
    """A run that has ended."""

    def __init__(self, ended: Exit) -> None:
        self.ended = ended

    def wait(self, seconds: float) -> Exit:
        return self.ended

    def stop(self) -> Exit:
        return self.ended


def job_of(launch: Launch) -> Any:
    """What the toy's program is to do."""
    return json.loads(Path(launch.argv[-1], "job.json").read_text())


def sizes_of(launch: Launch) -> tuple[int, int]:
    """The tensor parallelism and the micro-batch of a launch."""
    values = job_of(launch)["knobs"]
    return values["tensor_model_parallel_size"], values["micro_batch_size"]


def write_steps(launch: Launch, ms: float, steps: int = 3) -> None:
    """Write what the toy's program writes if its steps take `ms` each."""
    row = {"step_s": ms / 1000, "loss": 7.0, "effective": job_of(launch)["effective"]}
    Path(launch.folder, "metrics.json").write_text(f"{json.dumps(row)}\n" * steps)


def plain(tensor: int, micro: int) -> float:
    """Tensor parallelism of 2 with a micro batch of 2 is the best."""
    return 100.0 * {1: 1.5, 2: 1.0, 4: 1.2}[micro] * {1: 1.3, 2: 1.0}[tensor]


Answer = float | Exit | BaseException


class Instant(Launcher):
    """Plays each launch: `ms` gives a step's milliseconds for (tensor, micro batch), an exit code, or an exception."""

    name = "instant"

    def __init__(self, ms: Callable[[int, int], Answer]) -> None:
        self.ms, self.limits = ms, list[float]()

    def start(self, launch: Launch) -> Ended:
        self.limits.append(launch.timeout_seconds)
        answer = self.ms(*sizes_of(launch))
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Exit):
            return Ended(answer)
        write_steps(launch, answer)
        return Ended(Exit(code=0, ended_by=None, duration_s=1.0))


class Bench:
    """A small task, a folder and a launcher; `tune` runs the loop, again on what is there."""

    def __init__(self, folder: Path, launcher: Any = None) -> None:
        self.folder, self.launcher = folder, launcher or Instant(plain)
        self.events: list[Event] = []
        self.strategy: Any = PREDICTED
        self.prober: Strategy | None = None
        self.engine: Engine = toy.ENGINE
        self.plugin = plugin()
        self.cluster = ClusterSpec()

    def beside(self, name: str) -> None:
        """Use another, empty folder."""
        self.folder = self.folder / name
        self.folder.mkdir()

    def tune(
        self,
        batch: int = 8,
        *,
        baseline: Any = None,
        envs: Any = None,
        plugin: Any = None,
        cluster: ClusterSpec | None = None,
        **control: Any,
    ) -> TuneResult:
        limits = Control(train_iters=3, **control)
        spec = tasks.task(space=SPACE, control=limits, command=("train",), global_batch_size=batch).spec
        launcher = self.launcher.name
        spec = replace(spec, cluster=cluster or self.cluster, baseline=baseline, envs=envs or {}, launcher=launcher)
        parts = Dependencies(
            plugins=LoadedPlugins.of({"here": plugin or self.plugin}),
            engine=self.engine,
            launcher=self.launcher,
            strategy=self.strategy,
            probe_strategy=self.prober or self.strategy,
            open_store=lambda problem: OptunaStore(self.folder, problem.space.choices, run="run"),
            on_event=self.events.append,
        )
        return tune(spec, parts)


def knobs(candidate: Candidate) -> tuple[Any, Any]:
    values = candidate.as_dict()
    return values["tensor_model_parallel_size"], values["micro_batch_size"]


def sound(plan: Plan) -> bool:
    completed = plan.counts.measured + plan.counts.stopped + plan.counts.failed
    return plan.counts.balanced and completed == len(plan.trials)


def at(place: int, then: Sequence[Any] | Callable[[int, int], Answer], answer: Any) -> Callable[..., Any]:
    """Answer `answer` at the start number `place`, else as `then` does."""
    starts = iter(range(1000))
    return lambda *of: answer if next(starts) == place else then(*of)  # type: ignore[operator]
