"""SGLang, by `python -m sglang.launch_server`: releases 0.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import Axis, Columns, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.common import engine_args, metrics, program
from flagcore.engines.serving.common import knobs
from flagcore.engines.serving.common.names import DP, INSTANCES, TP
from flagcore.engines.serving.engine import PORT, Server, Settings
from flagcore.engines.serving.common.place import Place
from flagcore.engines.serving.common.sizes import fewest_devices
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.sglang import knobs as sglang_knobs
from flagcore.engines.serving.sglang import reading as sglang_reading
from flagcore.engines.serving.sglang import rules as sglang_rules
from flagcore.engines.serving.sglang.knobs import KNOBS, PACKAGE, PROGRAM, fixed_arguments, pool_tokens
from flagcore.errors import NoDevice


class SGLang:
    """SGLang's server."""

    name = "sglang"
    modules: Mapping[str, str] = {PACKAGE: "sglang>=0.5,<0.6"}
    health = "/health"

    def ready(self, spec: Spec) -> None:
        """Return if servers can be started here. Raises SpecError or NoDevice with what is in the way, and the fix."""
        check_directory(spec)
        command = program.found(spec, PROGRAM)
        installed = program.package_version(command[0], PACKAGE)
        program.check_version(spec, installed)
        if spec.serve.command is None and not installed:
            raise NoDevice(f"SGLang is not installed for {command[0]}; install sglang there, or give a serve.command")
        fixed_arguments(spec)

    def version(self, spec: Spec) -> str:
        """Return the version of the package, by its metadata."""
        return sglang_knobs.version_of(spec)

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs of SGLang's server."""
        return knobs.axes(task, KNOBS, fixed_arguments(task.spec)[0])

    def values(self, given: Mapping[str, object]) -> dict[str, KnobValue]:
        """Return knob values that a spec or a record has in the words of the axes. Raises SpecError."""
        return knobs.values(given, KNOBS, self.name)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what SGLang refuses or changes."""
        return sglang_rules.rules(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to SGLang."""
        return sglang_rules.merges(task)

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return SGLang's own values, on as many devices as the weights need."""
        fixed = fixed_arguments(task.spec)[0]
        return {knob.name: knob.neutral for knob in KNOBS} | {TP: fewest_devices(task)} | fixed

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return what SGLang makes of candidates."""
        return sglang_knobs.settings(task, columns)

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
        """Return how one instance of a candidate is started, devices aside."""
        spec, place = task.spec, Place.of(task)
        _, others = fixed_arguments(spec)
        instances, data = _count(values, INSTANCES), _count(values, DP)
        told = {**values, TP: _count(values, TP) * data, DP: 1}
        argv = [*program.found(spec, PROGRAM), "--model-path", spec.serve.weights or ""]
        argv += ["--host", "127.0.0.1", "--port", PORT, "--enable-metrics", *knobs.arguments(KNOBS, told)]
        if data > 1:
            own = "attn-dp-size" in sglang_knobs.installed_flags(spec)
            argv += ["--attn-dp-size", str(data)] if own else ["--dp-size", str(data), "--enable-dp-attention"]
        if place.on_cores and "device" not in others:
            argv += ["--device", "cpu"]
        if place.on_cores and "max-total-tokens" not in others:
            argv += ["--max-total-tokens", str(pool_tokens(task, instances))]
        argv += engine_flags.written(others, negated=False)
        environment = {"HF_HUB_OFFLINE": "1"}
        if cores:
            environment["OMP_NUM_THREADS"] = str(max(1, len(cores) // _count(told, TP)))
        return Server(argv=tuple(argv), environment=environment)

    def effective(self, fetch: Callable[[str], str], log: str) -> Mapping[str, KnobValue]:
        """Return what the resolved arguments and the log say."""
        return sglang_reading.effective(fetch, log)

    def counters(self, fetch: Callable[[str], str]) -> Mapping[str, float]:
        """Return what explains a score: waiting requests, cache in use, requests taken back."""
        return metrics.counters(fetch, sglang_reading.COUNTERS)

    def memory(self, log: str) -> Mapping[str, float]:
        """Return what the log says of weights, cache and the rest."""
        return sglang_reading.memory(log)

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what SGLang's log lines mean."""
        return sglang_reading.FAILURES


def _count(values: Mapping[str, KnobValue], knob: str) -> int:
    value = values.get(knob)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


ENGINE = SGLang()
