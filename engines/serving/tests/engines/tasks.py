"""Small made-up serving tasks: one load on cards or on cores. A real server of an engine, started as its adapter says,
for tests."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_serving.engine import ServingEngine
from flagcore_serving.job import Load, ServeSpec
from flagcore_serving.launch.server import Instance
from flagcore_serving.model.predict import predict as predict_engine
from flagcore_serving.space.hardware import Hardware
from flagcore_serving.space.placement import InstanceKinds, placements
from flagcore_serving.space.settings import Settings
from flagcore_serving.trial.failures import wait_until_quiet
from flagcore_serving.trial.servers import Server

from flagcore.contracts import Costs
from flagcore.domain.chip import Fact, Link
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.launch import Exit, classify
from flagcore.domain.model import Model
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import KnobValue, Space
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.domain.trial import TrialState
from flagcore.plugins import find_engine
from flagcore.tuner.stages.build import build, canonical
from tests.product import serving_inputs
from tests.product.tasks import CHIP, DENSE, SOURCE

SHARED = Link(name="loopback", topology="shared-memory", bytes_per_second=Fact(value=2e9, source=SOURCE))
CORE = replace(CHIP, name="core", link=SHARED, memory_bytes=Fact(value=8e9, source=SOURCE))
LOAD = Load(input_len=128, output_len=64, concurrency=16)
GIB = 2**30
MLA = replace(
    DENSE,
    multi_latent_attention=True,
    num_query_groups=4,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
)
SPEC_FIELDS = {each.name for each in fields(Spec)}
RELEASES = {"vllm": "0.32.0", "sglang": "0.5.23"}
COMMANDS = {"vllm": ("/bin/echo", "serve"), "lmdeploy": ("/bin/echo", "serve", "api_server")}


def serving(
    engine: str,
    *,
    nodes: int = 1,
    devices: int = 4,
    on_cores: bool = False,
    model: Model = DENSE,
    memory: int | None = None,
    chip: Mapping[str, Any] = {},
    **arguments: Any,
) -> Task:
    """A task on nodes with `devices` each; fields of `Spec` go to the spec, the rest to its serving job.

    `chip`: other fields of its chip.
    """
    outer = {name: arguments.pop(name) for name in SPEC_FIELDS & {*arguments}}
    work = ServeSpec(engine=engine, **{"loads": (LOAD,), **arguments})
    spec = Spec(model=model, work=work, **{"cluster": ClusterSpec(), **outer})
    kind = replace(CORE if on_cores else CHIP, **chip)
    group = NodeGroup(chip=kind, nodes=nodes, devices_per_node=devices, memory_bytes=memory)
    return Task(spec=spec, cluster=Cluster(groups=(group,)))


def planned(engine: str, **arguments: Any) -> Task:
    """A task of a known release with weights, which need not exist; two devices if they are cores."""
    arguments = {"weights": "hf", "command": COMMANDS.get(engine, ("/bin/echo",)), **arguments}
    arguments = {"engine_version": RELEASES.get(engine), "devices": 2 if arguments.get("on_cores") else 4, **arguments}
    return serving(engine, **arguments)


def engine_of(name: str) -> ServingEngine:
    """The engine with a name."""
    found = find_engine(name)
    assert isinstance(found, ServingEngine)
    return found


def server(task: Task, index: int = 0, **values: KnobValue) -> Instance:
    """How one instance of a candidate is started: the engine's defaults but for `values`."""
    engine = engine_of(task.spec.serve.engine)
    place = placements(task, {**engine.defaults(task), **values})[index]
    return engine.server(task, place.values, Hardware.of(task).cores(place.first, place.width))


def settings(task: Task, **values: KnobValue) -> Settings:
    """The settings of a candidate: the engine's defaults but for `values`."""
    engine = engine_of(task.spec.serve.engine)
    return engine.settings(task, row(engine, task, **values))


def failure(engine: ServingEngine, log: str) -> tuple[TrialState, str]:
    """What a failed server's log says."""
    return classify(Exit(code=1, ended_by=None, duration_s=1.0), log, engine.reports.failures)


def predict(task: Task, settings: Settings, costs: Costs, kinds: InstanceKinds | None = None) -> Predictions:
    """What the task's engine is predicted to do with settings."""
    engine: Any = find_engine(task.spec.serve.engine)
    overheads = engine.overheads_for(task, on_host=costs.synchronous)
    return predict_engine(task, settings, costs, overheads, untested=bool(engine.untested), kinds=kinds)


def figures(task: Task, **values: KnobValue) -> dict[str, float]:
    """The predicted metrics of a candidate: the engine's defaults but for `values`."""
    engine = engine_of(task.spec.serve.engine)
    found = engine.predict(task, row(engine, task, **values), serving_inputs.costs()).figures
    return {name: column.item() for name, column in found.items()}


def published(task: Task, values: Mapping[str, str]) -> tuple[Task, dict[str, KnobValue]]:
    """A job record of the task's engine, completed."""
    return find_engine(task.spec.serve.engine).published(task, values, "")[:2]


def space_of(engine: ServingEngine, task: Task) -> Space:
    """The space of a task."""
    return build(engine.axes(task), engine.rules(task), engine.merges(task))


def row(engine: ServingEngine, task: Task, **values: KnobValue) -> dict[str, Any]:
    """Columns of one candidate: the engine's defaults but for `values`."""
    axes = engine.axes(replace(task, spec=replace(task.spec, baseline=values)))
    expected = {**engine.defaults(task), **values}
    return {axis.knob: np.array([axis.encode(expected[axis.knob])]) for axis in axes}


def broken(engine: ServingEngine, task: Task, **values: KnobValue) -> list[str]:
    """The names of the rules that a candidate breaks."""
    columns = row(engine, task, **values)
    return [rule.name for rule in engine.rules(task) if rule.broken(columns).any()]


def merged(engine: ServingEngine, task: Task, **values: KnobValue) -> dict[str, int]:
    """The codes of a candidate after merging."""
    return {knob: int(codes[0]) for knob, codes in canonical(row(engine, task, **values), engine.merges(task)).items()}


SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv-heads": 2, "ffn": 256, "vocab": 1024, "context": 2048}
"""The shape of `tiny_model`."""


def tiny_model(folder: Path, shape: Mapping[str, int] = SIZES) -> str:
    """Return the file of a llama of random weights, of the example's shape but for `shape`."""
    maker, file = Path(__file__).parents[4] / "examples/tiny_gguf.py", folder / "tiny.gguf"
    sizes = [f"--{name}={size}" for name, size in shape.items()]
    subprocess.run([sys.executable, str(maker), str(file), *sizes], check=True, timeout=60)
    return str(file)


@contextmanager
def started(
    engine: ServingEngine, task: Task, values: Mapping[str, Any], folder: Path, patience: float = 150.0
) -> Iterator[Server]:
    """Start the first instance of a candidate, engine's defaults but for `values`, and stop it in the end.

    Raises TrialFailure if it does not become healthy.
    """
    running = Server("server", server(task, **values), folder / "log", engine.reports.failures)
    try:
        running.start(str(folder))
        running.wait_until_healthy(engine.reports.health, time.monotonic() + patience)
        wait_until_quiet(running.log)
        yield running
    finally:
        running.stop()
