"""Exports a candidate as a FlagScale configuration, which `flagscale train` and `flagscale serve` start.

Source of the keys: FlagScale 0.6 to 0.9, `flagscale/runner/runner_train.py` and `flagscale/serve`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flagcore_importers.dialect import placed
from flagcore_megatron.mixed.hetero import mixed
from flagcore_megatron.space.knobs import SPACE_KNOBS
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL
from flagcore_megatron.space.stages import LAYOUT

from flagcore.contracts import ExportJob
from flagcore.contracts.exchange import DEVICES_OF_HOST
from flagcore.domain.engine import EngineSupport
from flagcore.domain.secrets import is_secret
from flagcore.domain.spec import KIND
from flagcore.errors import UsageError
from flagcore.spec.plain_data import dump_yaml
from flagcore_flagscale.source import ENGINES, flagscale_name

LIBRARIES = ("flagcx",)
"""The collective libraries of FlagScale that connect chips of several vendors."""
ENTRYPOINT = "flagscale/train/train_gpt.py"
DATA_ARGUMENTS = re.compile(r"(train_|valid_|test_|mock_)?data|split|tokenizer|vocab|merge_file|num_workers")
SYSTEM = {flag.name.replace("-", "_") for knob in SPACE_KNOBS for flag in knob.flags}
MODEL_KNOBS = ("micro_batch_size",)
SIZES_OF_MODEL = ("num_layers", "hidden_size", "num_attention_heads")
LISTS = {"hetero_process_meshes", "hetero_pipeline_layer_split", "hetero_device_types"}
OF_MESHES = ("expert_tensor_parallel_size_per_process_mesh", "use_partial_reduce_for_shared_embedding")
NOT_EXPORTED = ("host", "port", "model", "model_path", "metrics", "enable_metrics")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?", re.IGNORECASE)


def export(job: ExportJob) -> Mapping[str, str]:
    """Return the top file of a configuration and its section file. Raises UsageError if FlagScale cannot start the
    job."""
    engine = job.platform.task.spec.work.engine
    if engine not in ("command", "megatron", *ENGINES.values()):
        raise UsageError(f"--to flagscale: FlagScale does not have the engine {engine}")
    if job.servers is not None and job.servers.front is not None:
        raise UsageError("FlagScale gives all servers the same arguments")
    if job.servers is not None:
        raise UsageError("FlagScale starts each server on one host")
    section = "serve" if job.launch.ready else "train"
    content: Any = _serve(job) if job.launch.ready else _train(job)
    top = {
        "defaults": ["_self_", {section: job.name}],
        "experiment": _experiment(job, section),
        "action": "run",
        "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }
    comments = [f"# {line}" for line in job.comments]
    comments.append(f"# Start: python run.py --config-path FOLDER --config-name {section}, with run.py of FlagScale.")
    if job.launch.sample:
        comments.append(f"# The tree trains on generated data. Add {job.launch.missing}.")
    if own := [name for name, value in job.launch.environment.items() if _set_by_user(name, value)]:
        comments.append(f"# Set on each host, because they are secret or name its network devices: {', '.join(own)}.")
    if job.nodes > 1:
        kind = " type=TYPE" if job.platform.setups else ""
        text = f"# Set experiment.runner.hostfile to the file with the nodes, one `host slots=8{kind}` per line."
        comments.append(text)
    return {f"{section}.yaml": "\n".join([*comments, dump_yaml(top)]), f"{section}/{job.name}.yaml": dump_yaml(content)}


def _experiment(job: ExportJob, section: str) -> dict[str, Any]:
    runner: dict[str, Any] = {"backend": "torchrun"} if section == "train" else {"deploy": {"use_fs_serve": False}}
    task = {"type": section, **({"backend": "megatron", "entrypoint": ENTRYPOINT} if section == "train" else {})}
    runner["nnodes"] = job.nodes
    envs: dict[str, Any] = _exported(job.launch.environment)
    if job.platform.setups and section == "train":
        runner["rdzv_backend"] = "static"
        of_types = {
            each.kind: _visible(each.support, each.devices) | _exported({**each.environment, **each.envs})
            for each in job.platform.setups
        }
        own = {name for variables in of_types.values() for name in variables}
        envs = {name: value for name, value in envs.items() if name not in own}
        envs["device_type_specific"] = of_types
    else:
        runner["nproc_per_node"] = devices = job.platform.task.cluster.groups[0].devices_per_node
        if section == "train" and job.nodes > 1:
            envs |= _visible(job.platform.support, devices)
    if section == "train" and (of_hosts := job.platform.task.spec.cluster.host_envs):
        envs["node_specific"] = {host: _exported(variables) for host, variables in of_hosts.items()}
    return {"exp_name": job.name, "exp_dir": f"outputs/{job.name}", "task": task, "runner": runner, "envs": envs}


def _visible(support: EngineSupport, devices: int) -> dict[str, Any]:
    """Return the variable that selects the visible devices of a host: FlagScale's runner fails on a host file without
    one (16a2dd5, `flagscale/runner/runner_train.py`, `run_node`)."""
    names = [name for name in support.visible_devices[:1] if name.endswith("_VISIBLE_DEVICES")]
    return dict.fromkeys(names, ",".join(map(str, range(devices))))


def _exported(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in environment.items()
        if not (name.endswith("_VISIBLE_DEVICES") or _set_by_user(name, value))
    }


def _set_by_user(name: str, value: str) -> bool:
    """Return whether a variable is a secret, or names network devices, which are different on each host."""
    return is_secret(name, value) or any(each in value for each in DEVICES_OF_HOST)


def _train(job: ExportJob) -> dict[str, Any]:
    argv = [*job.launch.argv, *job.launch.sample]
    program = next((index for index, word in enumerate(argv) if word.endswith(".py")), None)
    if program is None:
        raise UsageError("--to flagscale needs a torchrun command, but train.command is a script")
    arguments = _arguments(argv[program + 1 :])
    if lacking := [f"--{name.replace('_', '-')}" for name in SIZES_OF_MODEL if name not in arguments]:
        raise UsageError(f"--to flagscale needs the model's arguments, but train.command lacks {', '.join(lacking)}")
    if job.launch.sample and len({group.chip.vendor for group in job.platform.task.cluster.groups}) > 1:
        named = [{*each.support.cross_vendor_libraries} for each in job.platform.setups]
        if not (common := set.intersection({*LIBRARIES}, *named)):
            text = "--to flagscale: {} connects {}, according to the installed plugins, but not all chips of this job"
            chips = [each.kind for each in job.platform.setups if LIBRARIES[0] in each.support.cross_vendor_libraries]
            raise UsageError(text.format(LIBRARIES[0], ", ".join(chips) or "none"))
        arguments["distributed_backend"] = min(common)
    if job.platform.setups and "enable_hetero" not in arguments:
        if job.candidate.as_dict().get(LAYERS_PER_VIRTUAL):
            raise UsageError(
                f"--to flagscale: {LAYERS_PER_VIRTUAL} must be 0, because meshes exclude virtual pipeline stages; "
                f"add --set auto_tuner.space.{LAYERS_PER_VIRTUAL}=0"
            )
        of_meshes = mixed(job.platform, job.candidate.as_dict())
        arguments |= {**_arguments(of_meshes.words), "pipeline_model_parallel_size": of_meshes.stages}
        arguments.pop(LAYOUT, None)
    return _by_section(job, arguments)


def _by_section(job: ExportJob, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in the sections of FlagScale's configuration."""
    sections: dict[str, dict[str, Any]] = {"system": {}, "model": {}, "data": {}}
    if hetero := {name: arguments.pop(name) for name in list(arguments) if "hetero" in name or name in OF_MESHES}:
        hetero |= {name: _listed(hetero[name]) for name in LISTS & hetero.keys()}
        if hetero.get("hetero_current_device_type") == KIND:
            hetero["hetero_current_device_type"] = job.platform.setups[0].kind
        sections["system"]["hetero"] = hetero
    for name in [name for name in arguments if name.endswith("_per_stage_micro_batch")]:
        arguments[name] = [json.loads(str(row)) for row in _listed(arguments[name])]
    for name, value in arguments.items():
        is_system = name in SYSTEM and name not in MODEL_KNOBS
        section = "system" if is_system else "data" if DATA_ARGUMENTS.match(name) else "model"
        sections[section][name] = value
    return sections


def _serve(job: ExportJob) -> list[dict[str, Any]]:
    serve, values = job.platform.task.spec.serve, job.candidate.as_dict()
    name = flagscale_name(serve.engine)
    arguments = {key: value for key, value in _arguments(job.launch.argv).items() if key not in NOT_EXPORTED}
    sizes = [values.get(key) for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size")]
    tensor, stages = (size if isinstance(size, int) else 1 for size in sizes)
    return [
        {
            "serve_id": "vllm_model",
            "engine": name,
            "engine_args": {"model": serve.weights or ""},
            "engine_args_specific": {name: arguments},
            "resources": {"num_gpus": tensor * stages, "num_replicas": job.replicas},
        }
    ]


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a command, with underscores in their names. A switch is True, and several values are a
    list."""
    return {name: value for name, value, _start, _end in placed(words, _value)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(text: str) -> Any:
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)
