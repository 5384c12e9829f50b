"""Every public name on every engine gets an answer or one line that says why not, and has equal weights everywhere.

`python -m tests.product.models.test_matrix [NAME ...]` prints a JSON line per cell, or all without names."""

import json
import math
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import parameters, product_counts, without_repeats
from flagcore_models.mixers.latent_attention import EXPANSION
from flagcore_models.public import public_models

from flagcore.api import LoadedSpec, changed_spec, spec_of_model
from flagcore.api.inputs import read_spec
from flagcore.api.jobs import detailed_predictions
from flagcore.contracts import Costs, Platform, Problem
from flagcore.domain.cluster import Cluster
from flagcore.domain.model import Model
from flagcore.domain.prediction import Prediction
from flagcore.domain.space import KnobValue
from flagcore.errors import FlagError, NothingFits
from flagcore.plugins import GROUP, LoadedPlugins, engine_of, load_plugins, names
from flagcore.spec.models import model_from
from flagcore.tuner.problem import build_problem, candidate_columns, recommended, rows_by_time
from flagcore.tuner.stages.predict import predict_columns, predict_components

NAMES = sorted(public_models())
SEED = date.today().toordinal()
"""The seed of the drawn names, which changes every day. The test of all names has each of them as a parameter."""
DRAWN = sorted(random.Random(SEED).sample(NAMES, len(NAMES) // 10))


@pytest.mark.costly
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_names_have_an_answer_or_one_line_on_every_engine(name: str) -> None:
    draw = random.Random(f"{SEED} {name}")
    sizes = [(engine, draw.choice(SIZES), draw.random() < 0.5) for engine in SPACES]
    found = [cell(name, engine, size, whole=False, weighed=weighed) for engine, size, weighed in sizes]
    assert not [line for each in found for line in problems(each)], f"seed {SEED}"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_answer_or_one_line_on_every_engine(name: str) -> None:
    assert not [line for each in cells([name]) for line in problems(each)]


CHIP, DEVICES = "H200", 8
SIZES = ("small", "large")
"""The numbers of nodes of a cell: the smallest power of two that holds the job, and four times as many."""
BYTES = {"train": 2 * 18.0, "serve": 2 * 2.0}
"""Bytes of memory per weight in a job of each kind: its states, and as much again for everything else."""
_TRAINING: Mapping[str, Any] = {
    "micro_batch_size": [1],
    "context_parallel_size": [1],
    "tensor_model_parallel_size": [1],
}
_SERVING: Mapping[str, Any] = {
    "instances": "auto",
    "tensor_model_parallel_size": "auto",
    "pipeline_model_parallel_size": [1],
    "context_len": [4096],
}
SPACES: Mapping[str, Mapping[str, Any]] = {
    "megatron": {
        **_TRAINING,
        "tensor_model_parallel_size": [1, 8],
        "pipeline_model_parallel_size": "auto",
        "expert_model_parallel_size": [1, 8, 32],
        "sequence_parallel": [False, True],
        "use_distributed_optimizer": [True],
        "num_layers_per_virtual_pipeline_stage": "auto",
        "use_recompute": [True],
        "recompute_granularity": ["full"],
        "recompute_method": ["uniform"],
        "recompute_num_layers": [1],
    },
    "fsdp2": {
        **_TRAINING,
        "data_parallel_replicate_size": [1],
        "data_parallel_shard_size": "auto",
        "pipeline_model_parallel_size": [1],
        "expert_model_parallel_size": [1, 8],
        "activation_checkpointing": ["full"],
        "reshard_after_forward": [True],
        "reduce_dtype": ["fp32"],
        "state_dtype": ["fp32"],
        "cpu_offload": [False],
        "compile": [False],
    },
    "deepspeed": {
        **_TRAINING,
        "zero_stage": [3],
        "activation_checkpointing": ["full"],
        "offload_optimizer": ["none"],
        "overlap_comm": [True],
        "reduce_bucket_size": [50_000_000],
        "zero_hpz_partition_size": [1],
        "zero_quantized_weights": [False],
        "zero_quantized_gradients": [False],
    },
    "torchtitan": {**_TRAINING, "activation_checkpointing": ["full"], "reshard_after_forward": ["default"]},
    "vllm": {**_SERVING, "data_parallel_size": [1], "expert_model_parallel_size": [1]},
    "sglang": {**_SERVING, "data_parallel_size": [1], "expert_model_parallel_size": [1]},
    "llamacpp": {**_SERVING, "pipeline_model_parallel_size": [1, 8]},
}
"""The space of each engine: few layouts, among them those of usual recipes."""
KINDS = {name: "serve" if space.get("instances") else "train" for name, space in SPACES.items()}
_ALONE = {f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "expert")}
ONE_DEVICE: Mapping[str, tuple[Mapping[str, KnobValue], str]] = {
    "megatron": (
        _ALONE
        | {
            "sequence_parallel": False,
            "use_distributed_optimizer": True,
            "num_layers_per_virtual_pipeline_stage": None,
        },
        "data_parallel_size",
    ),
    "fsdp2": (_ALONE, "data_parallel_shard_size"),
    "deepspeed": ({"zero_stage": 1}, ""),
    "torchtitan": ({}, ""),
    **dict.fromkeys(("vllm", "sglang", "llamacpp"), (_ALONE | {"instances": 1}, "")),
}
"""For each engine, the knobs of a job whose tensors are not split, and the knob of its number of devices, if any."""
SPLIT_BYTES = {"megatron": (12.0,), "fsdp2": (16.0,), "deepspeed": (12.0,), "torchtitan": (16.0, 18.0)}
"""The bytes per weight that replicas divide. torchtitan's are those of FSDP2, or of ZeRO 3 for other models."""
TOLERANCE = 1e-3
PIPELINE = 4
"""The stages over which the weights of a Megatron job are added up."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one engine answers for one name on one number of nodes.

    `outcome`: "answer", "refusal" (one line in `text`), "traceback" (its end), or "several lines".
    `weights`: by path, the numbers of weights without multi-token prediction and vision tower.
    """

    name: str
    engine: str
    size: str
    nodes: int
    outcome: str
    text: str = ""
    step_time_s: float | None = None
    static_bytes: float | None = None
    weights: Mapping[str, float] | None = None
    seconds: float = 0.0


class _Plugins(LoadedPlugins):
    """The plugins, which give the costs of an engine on a number of nodes once."""

    def costs(self, cluster: Cluster, engine: str, engine_version: str | None = None) -> Costs:
        known, key = self.__dict__.setdefault("known", {}), (cluster.devices, engine, engine_version)
        if key not in known:
            known[key] = super().costs(cluster, engine, engine_version)
        found: Costs = known[key]
        return found


@cache
def plugins() -> LoadedPlugins:
    """Return the plugin of the chip, loaded once."""
    owner = load_plugins().owner(CHIP)
    return _Plugins(load_plugins({*names(GROUP)} - {owner}).plugins)


@cache
def _spec(engine: str) -> LoadedSpec:
    spec = spec_of_model("Qwen/Qwen3-8B", engine=engine, chip=CHIP, nodes=1, devices=DEVICES)
    return changed_spec(spec, {"auto_tuner.space": SPACES[engine]})


def text_model(name: str) -> Model:
    """Return a public model without multi-token prediction and vision tower."""
    return replace(model_from(name, base=Path()), mtp_num_layers=0, vision=None)


def nodes_of(name: str, engine: str, size: str) -> int:
    """Return the number of nodes of a cell."""
    needed = BYTES[KINDS[engine]] * parameters(text_model(name)) / (DEVICES * 141e9)
    return 4 ** (size == "large") << max(math.ceil(math.log2(needed)), 0)


def cell(name: str, engine: str, size: str, *, whole: bool = True, weighed: bool = True) -> Cell:
    """Return what an engine answers for a name.

    `whole`: as `flag estimate --model NAME --engine ENGINE` with a small space. Otherwise, one layout is predicted on
    the platform of another model. `weighed`: whether the weights are counted.
    """
    started, nodes = time.process_time(), nodes_of(name, engine, size)
    found: dict[str, Any] = {}
    try:
        platform, values, answer = (_planned if whole else _predicted)(name, engine, nodes)
        found = {"outcome": "answer", "step_time_s": answer.step_time_s, "static_bytes": answer.static_bytes}
        if weighed:
            found["weights"] = weights(name, engine, platform, values)
    except FlagError as error:
        lines = str(error).splitlines()
        found = {"outcome": "refusal" if len(lines) == 1 else "several lines", "text": str(error)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "/".join(frame.filename.rsplit("/", 2)[-2:])
        text = f"{type(error).__name__}: {error} ({place}:{frame.lineno}, {frame.name})"
        found |= {"outcome": "traceback", "text": text}
    return Cell(name=name, engine=engine, size=size, nodes=nodes, seconds=time.process_time() - started, **found)


def _planned(name: str, engine: str, nodes: int) -> tuple[Platform, Mapping[str, KnobValue], Prediction]:
    """Return the platform, the baseline and the prediction of the recommended candidate. Raises FlagError."""
    changes: dict[str, Any] = {"model": name, "cluster.nodes": nodes}
    if KINDS[engine] == "train":
        changes["train.global_batch_size"] = 8 * DEVICES * nodes
    problem = _problem(changed_spec(_spec(engine), changes))
    order = rows_by_time(problem)
    if not order.size:
        raise NothingFits("no candidate fits")
    row = order[[recommended(problem, order)]]
    answer = detailed_predictions(problem.platform, problem.space.columns(row))[0]
    return problem.platform, problem.baseline.as_dict(), answer


def _predicted(name: str, engine: str, nodes: int) -> tuple[Platform, Mapping[str, KnobValue], Prediction]:
    """Return the platform, a candidate without tensor parallelism, and its prediction. Raises FlagError."""
    shared, (alone, replicas) = _shared(engine), ONE_DEVICE[engine]
    work = {"weights": name} if KINDS[engine] == "serve" else {"global_batch_size": 8 * DEVICES * nodes}
    platform = _resized(shared.platform, model_from(name, base=Path()), nodes, DEVICES, **work)
    values = {**shared.baseline.as_dict(), **alone, **({replicas: DEVICES * nodes} if replicas else {})}
    platform.engine.rules(platform.task)
    answer = detailed_predictions(platform, candidate_columns(platform, values), details=False)[0]
    return platform, values, answer


def _problem(spec: LoadedSpec) -> Problem:
    read = read_spec(spec)
    return build_problem(read, plugins(), engine_of(read.work), plan=True)


@cache
def _shared(engine: str) -> Problem:
    return _problem(_spec(engine))


def _resized(platform: Platform, model: Model, nodes: int, devices: int, **work: Any) -> Platform:
    """Return the platform with another model, on as many nodes with as many devices, and with changes of the job."""
    task = platform.task
    groups = tuple(replace(each, nodes=nodes, devices_per_node=devices) for each in task.cluster.groups)
    job: Any = task.spec.work
    spec = replace(task.spec, model=model, work=replace(job, **work))
    return replace(platform, task=replace(task, spec=spec, cluster=replace(task.cluster, groups=groups)))


def weights(name: str, engine: str, platform: Platform, values: Mapping[str, KnobValue]) -> dict[str, float]:
    """Return the weights of a model by path.

    `catalogue`: what the public table counts. `memory`: what a device of a server holds in 16 bits, or what
    replicas of a training job divide. `stages of N`: all components of a Megatron job on all stages of a pipeline.
    """
    model, (alone, replicas) = text_model(name), ONE_DEVICE[engine]
    found, own = {"catalogue": parameters(model)}, {**values, **alone}
    if KINDS[engine] == "serve":
        one = _resized(platform, model, 1, 1, precision="bf16", weights=None)
        held = predict_columns(one, candidate_columns(one, own))
        on_host = (engine == "llamacpp") * model.untie_embeddings_and_output_weights * model.vocab_size
        found["memory"] = float(held.static_bytes[0] - held.figures["kv_cache_bytes"][0]) / 2.0
        found["memory"] += on_host * model.hidden_size  # the embedding
        if engine == "sglang":  # it keeps a second form of what expands latents
            counts = product_counts(without_repeats(model)).items()
            found["memory"] -= sum(number * each.weights for each, number in counts if each.name == EXPANSION)
        return found
    is_odd = engine == "fsdp2" and model.experts % 2  # its ranks have whole experts
    ranks, static = (1, model.experts if is_odd else 2), list[float]()
    for devices in ranks:
        few = _resized(platform, model, 1, devices)
        sized = {**own, replicas: devices} if replicas else own
        static.append(float(predict_columns(few, candidate_columns(few, sized)).static_bytes[0]))
    counts = [ranks[1] / (ranks[1] - 1.0) * (static[0] - static[1]) / each for each in SPLIT_BYTES[engine]]
    found["memory"] = min(counts, key=lambda count: abs(count - found["catalogue"]))
    if engine == "megatron":
        staged = _resized(platform, model, 1, DEVICES)
        found |= {f"stages of {size}": _staged(staged, own, size) for size in (1, PIPELINE)}
    return found


def _staged(platform: Platform, values: Mapping[str, KnobValue], size: int) -> float:
    """Return the weights of all components on all stages of a pipeline, but for a second copy of the embedding."""
    columns = candidate_columns(platform, {**values, "pipeline_model_parallel_size": size})
    rows = {name: np.repeat(codes, size) for name, codes in columns.items()}
    parts = predict_components(platform, rows, np.arange(size))
    model = platform.task.spec.model
    copied = size > 1 and not model.untie_embeddings_and_output_weights
    total = sum(float(figures["params"].sum()) for figures in parts.values())
    return total - copied * model.vocab_size * model.hidden_size


def problems(cell: Cell) -> list[str]:
    """Return what is wrong with a cell: no answer in one line, or paths whose weights differ from the first by 0.1%."""
    place = f"{cell.engine} on {cell.nodes} nodes"
    if cell.outcome not in ("answer", "refusal"):
        return [f"{place}: {cell.outcome}: {cell.text}"]
    counts = dict(cell.weights or {})
    expected = counts.pop("catalogue", 0.0)
    return [
        f"{place}: {path} has {count / 1e9:.3f} billion weights, not {expected / 1e9:.3f}"
        for path, count in counts.items()
        if abs(count - expected) > TOLERANCE * expected
    ]


def cells(of: Sequence[str] = (), sizes: tuple[str, ...] = SIZES) -> Iterator[Cell]:
    """Yield the cells of these names, by default of all public ones."""
    for name in of or sorted(public_models()):
        for engine in SPACES:
            for size in sizes:
                yield cell(name, engine, size, weighed=size == "small")


if __name__ == "__main__":
    for each in cells(sys.argv[1:]):
        print(json.dumps(asdict(each)), flush=True)
