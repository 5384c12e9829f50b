"""llama.cpp: the user's own llama-server, or the server of the xllamacpp wheel behind the same flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Axis, Columns, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.llamacpp import knobs as llama_knobs
from flagcore.engines.serving.llamacpp import reading as llama_reading
from flagcore.engines.serving.llamacpp import rules as llama_rules
from flagcore.engines.serving.llamacpp.flags import FLAGS
from flagcore.engines.serving.llamacpp.knobs import (
    AUTO_SLOTS,
    CONTEXT,
    KNOBS,
    KV,
    PARALLEL,
    SPLIT,
    THREADS,
    UNIFIED,
    fixed_arguments,
    slot_context,
    total_context,
)
from flagcore.engines.serving.common import knobs
from flagcore.engines.serving.common import metrics, program
from flagcore.engines.serving.common.names import INSTANCES, PP, TP
from flagcore.engines.serving.engine import PORT, Server, Settings
from flagcore.engines.serving.common.sizes import fewest_devices
from flagcore.errors import NoDevice, SpecError

PACKAGE = "xllamacpp"
RUNNER = "flagcore.engines.serving.llamacpp.server"


class LlamaCpp:
    """llama.cpp's server."""

    name = "llamacpp"
    modules: Mapping[str, str] = {PACKAGE: PACKAGE}
    health = "/health"

    def ready(self, spec: Spec) -> None:
        """Return if servers can be started here. Raises SpecError or NoDevice with what is in the way, and the fix."""
        serve = spec.serve
        if serve.weights is None or not os.path.isfile(serve.weights):
            fix = "give the path of a GGUF file; examples/tiny_gguf.py makes a small one"
            problem = "is missing" if serve.weights is None else "is no file"
            raise SpecError(key="serve.weights", value=serve.weights, problem=problem, fix=fix)
        fixed_arguments(spec)
        if serve.command is not None:
            program.found(spec, serve.command)
        elif find_spec(PACKAGE) is None:
            raise NoDevice(
                f"llama.cpp needs {PACKAGE}, not installed here; pip install 'flagcore[llamacpp]', or give a "
                "serve.command such as [llama-server]"
            )
        else:
            program.check_version(spec, program.package_version(sys.executable, PACKAGE))

    def version(self, spec: Spec) -> str:
        """Return the planned version, else that of the wheel; a binary of the user's own keeps none beside it."""
        wheel = "" if spec.serve.command is not None else program.package_version(sys.executable, PACKAGE)
        return spec.serve.engine_version or wheel

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs of llama-server."""
        return knobs.axes(task, KNOBS, fixed_arguments(task.spec)[0])

    def values(self, given: Mapping[str, object]) -> dict[str, KnobValue]:
        """Return knob values that a spec or a record has in the words of the axes. Raises SpecError."""
        return knobs.values(given, KNOBS, self.name)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what llama.cpp refuses, changes without a word, or crashes at."""
        return llama_rules.rules(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to llama.cpp."""
        return llama_rules.merges(task)

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return llama.cpp's own values, on as many devices as the weights need, layer by layer."""
        fixed = fixed_arguments(task.spec)[0]
        return {knob.name: knob.neutral for knob in KNOBS} | {PP: fewest_devices(task)} | fixed

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return what llama.cpp makes of candidates."""
        return llama_knobs.settings(task, columns)

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
        """Return how one instance of a candidate is started, devices aside."""
        return server(task, values, cores)

    def effective(self, fetch: Callable[[str], str], log: str) -> Mapping[str, KnobValue]:
        """Return what /props and the log say. Raises OSError or ValueError if /props does not answer."""
        return llama_reading.effective(fetch, log)

    def counters(self, fetch: Callable[[str], str]) -> Mapping[str, float]:
        """Return how full the slots were, and what waited."""
        return metrics.counters(fetch, llama_reading.COUNTERS)

    def memory(self, log: str) -> Mapping[str, float]:
        """Return what the log says of weights, cache and the rest."""
        return llama_reading.memory(log)

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what llama.cpp's log lines mean."""
        return llama_reading.FAILURES


def server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
    """Return how one instance of a candidate is started, devices aside."""
    spec = task.spec
    _, others = fixed_arguments(spec)
    embedded = spec.serve.command is None
    command = (sys.executable, "-m", RUNNER) if embedded else program.found(spec, spec.serve.command or ())
    argv = [*command, "--model", spec.serve.weights or "", "--host", "127.0.0.1", "--port", PORT, "--metrics"]
    argv += knobs.arguments([knob for knob in KNOBS if knob.name not in _CARRIED], values)
    slots, context = _int(values.get(PARALLEL)), _int(values.get(CONTEXT))
    if (slots or context) and not total_context(task):
        argv += ["--ctx-size", str((slots or AUTO_SLOTS) * slot_context(task, context))]
    if values.get(KV) is not None:
        argv += ["--cache-type-k", str(values[KV]), "--cache-type-v", str(values[KV])]
    if values.get(UNIFIED) is not None:
        argv += ["--kv-unified" if values[UNIFIED] == "on" else "--no-kv-unified"]
    if values.get(SPLIT) is None and (_int(values.get(TP)) or 1) > 1:
        argv += ["--split-mode", "row"]
    if values.get(THREADS) is None and cores and (_int(values.get(INSTANCES)) or 1) > 1:
        argv += ["--threads", str(len(cores))]
    if not others.keys() & {"cache-ram", "cram"}:
        argv += ["--cache-ram", "0"]  # each trial's prompts are fresh: keeping them in the host's memory only costs
    if embedded and not others.keys() & {"verbosity", "log-verbosity", "lv"}:
        argv += ["--verbosity", "4"]  # the level at which batch sizes and attention are told
    argv += [word for name, value in others.items() for word in _flag(name, value)]
    return Server(argv=tuple(argv), environment={"OMP_WAIT_POLICY": "passive"})


_CARRIED = (CONTEXT, KV, UNIFIED)
"""Knobs that are no single flag."""


def _flag(name: str, value: EngineArg) -> Sequence[str]:
    """Return a flag of `engine_args` as words: true is a bare flag, false its opposite, unless it takes on and off."""
    flag = next((each for each in FLAGS if any(name == spelt.lstrip("-") for spelt in each.names)), None)
    dashes = "-" if flag is not None and f"-{name}" in flag.names else "--"
    if isinstance(value, bool):
        if flag is not None and (flag.kind == "on/off" or "on" in (flag.words or {})):
            return (dashes + name, "on" if value else "off")
        if value:
            return (dashes + name,)
        return (flag.off[-1],) if flag is not None and flag.off else (f"--no-{name}",)
    return () if value is None else (dashes + name, str(value))


def _int(value: KnobValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


ENGINE = LlamaCpp()
