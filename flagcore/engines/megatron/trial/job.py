"""The job file of a trial: the model, its split and the kind of device.

Plain frozen data, validated when it is read. Nothing here imports torch, so that an invalid job is refused before slow
imports. Sizes are counts; a null, or a 0 in an optional size, means "off" or "the default".
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")

_MIN_MICROBATCHES = 4
"""Minimum number of micro-batches of a probe, since the first few differ from the others."""


class JobError(ValueError):
    """The job is invalid. The message is one line with the key and the value."""


@dataclass(frozen=True)
class Model:
    """A transformer's shape, in Megatron-core's field names."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    ffn_hidden_size: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    gated_linear_unit: bool = True
    untie_embeddings_and_output_weights: bool = True
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_first_dense_layers: int | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_num_layers: int | None = None


@dataclass(frozen=True)
class Train:
    """What all candidates share: the work of one step and the number of steps.

    `balanced_routing` assigns tokens to experts evenly at random: untrained routers favour a few experts.
    """

    seq_length: int
    global_batch_size: int
    precision: str
    train_iters: int
    seed: int
    balanced_routing: bool = False


@dataclass(frozen=True)
class Candidate:
    """The knobs, by their names in the search space."""

    data_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    micro_batch_size: int = 1
    use_distributed_optimizer: bool = False
    sequence_parallel: bool = False
    use_recompute: bool | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed: `use_recompute` or, if it is None, whether a granularity is given."""
        return self.recompute_granularity is not None if self.use_recompute is None else self.use_recompute


@dataclass(frozen=True)
class Device:
    """The kind of device, by torch's names of it and of its collectives.

    `preload` are modules that register the device, imported in order after torch.
    """

    type: str = "cpu"
    backend: str = "gloo"
    preload: tuple[str, ...] = ()
    threads_per_rank: int = 1


@dataclass(frozen=True)
class Probe:
    """This process runs one rank on one device; the other ranks do not exist."""

    rank: int
    device: int = 0


@dataclass(frozen=True)
class Job:
    """One trial, or the probe of one of its ranks."""

    model: Model
    train: Train
    candidate: Candidate
    device: Device
    output: Path
    probe: Probe | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks, one per device."""
        c = self.candidate
        return (
            c.data_parallel_size
            * c.tensor_model_parallel_size
            * c.pipeline_model_parallel_size
            * c.context_parallel_size
        )

    @property
    def processes(self) -> int:
        """Number of ranks that run here: all, or the one that is probed."""
        return self.world_size if self.probe is None else 1

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each data-parallel copy runs in one step."""
        return self.train.global_batch_size // (self.candidate.micro_batch_size * self.candidate.data_parallel_size)

    def enough_microbatches(self, stage: int) -> int:
        """Return how many micro-batches fill the pipeline up to `stage` and reach its steady state, or all there are.

        1F1B begins with one forward pass per later stage. The interleaved schedule works on groups of as many
        micro-batches as stages, and begins backward passes before the second group ends.
        """
        stages = self.candidate.pipeline_model_parallel_size
        enough = 2 * stages if self.virtual_stages else max(_MIN_MICROBATCHES, stages - stage + 1)
        return min(self.num_microbatches, enough)

    @property
    def virtual_stages(self) -> int | None:
        """Model chunks on each pipeline stage, or None when the schedule is not interleaved."""
        layers_per_chunk = self.candidate.num_layers_per_virtual_pipeline_stage
        if layers_per_chunk is None:
            return None
        stages = self.candidate.pipeline_model_parallel_size * layers_per_chunk
        chunks = self.model.num_layers // stages
        return chunks if chunks > 1 else None


def load_job(path: Path) -> Job:
    """Read and check a job file.

    Raises:
        JobError: the file is not JSON, a key is unknown, missing or of the wrong type, or values contradict
            each other. Rules that Megatron checks itself are not repeated.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: {error}") from None
    return parse_job(data)


def parse_job(data: object) -> Job:
    """Turn a job's decoded JSON into a `Job`; raises `JobError` as `load_job` does."""
    if not isinstance(data, dict):
        raise JobError(f"a job must be a JSON object, not {data!r}")
    known = [field.name for field in dataclasses.fields(Job)]
    _refuse_unknown(data, known, "job")
    missing = [name for name in known if name not in data and name != "probe"]
    if missing:
        raise JobError(f"job.{missing[0]} is missing")
    if not isinstance(data["output"], str):
        raise JobError(f"job.output = {data['output']!r} must be the name of a folder")
    job = Job(
        model=_parse(Model, data["model"], "model"),
        train=_parse(Train, data["train"], "train"),
        candidate=_parse(Candidate, data["candidate"], "candidate"),
        device=_parse(Device, data["device"], "device"),
        output=Path(data["output"]),
        probe=_parse(Probe, data["probe"], "probe") if data.get("probe") is not None else None,
    )
    _check(job)
    return job


def _parse(kind: type[T], data: object, where: str) -> T:
    """Build the dataclass `kind` from a JSON object, checking each key and type."""
    if not isinstance(data, dict):
        raise JobError(f"{where} = {data!r} must be a JSON object")
    hints = get_type_hints(kind)
    _refuse_unknown(data, list(hints), where)
    required = {
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING
    }
    values = {}
    for name, hint in hints.items():
        value = data.get(name)
        if value is not None:
            value = _value(value, str(hint), f"{where}.{name}")
        if value is not None:
            values[name] = value
        elif name in required:
            raise JobError(f"{where}.{name} is missing")
    return kind(**values)


def _refuse_unknown(data: dict[str, Any], known: list[str], where: str) -> None:
    for name in data:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise JobError(f"{where}.{name} = {data[name]!r} is not a known key{hint}")


def _value(value: Any, hint: str, key: str) -> Any:
    """Check one value against the text of its annotation. A 0 in an optional size becomes None."""
    if "bool" in hint:
        if not isinstance(value, bool):
            raise JobError(f"{key} = {value!r} must be true or false")
    elif "tuple" in hint:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise JobError(f"{key} = {value!r} must be a list of strings")
        return tuple(value)
    elif "str" in hint:
        if not isinstance(value, str):
            raise JobError(f"{key} = {value!r} must be a string")
    else:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise JobError(f"{key} = {value!r} must be a whole number, 0 or more")
        if value == 0 and "None" in hint:
            return None
        if value == 0 and key not in ("train.seed", "probe.rank", "probe.device"):
            raise JobError(f"{key} = 0 must be at least 1")
    return value


def _check(job: Job) -> None:
    """Check rules that Megatron-core leaves to its caller."""
    model, train, candidate = job.model, job.train, job.candidate
    if job.probe is not None and job.probe.rank >= job.world_size:
        raise JobError(
            f"probe.rank = {job.probe.rank} must be below "
            f"data * tensor * pipeline * context parallel = {job.world_size}"
        )
    if train.precision not in ("bf16", "fp16", "fp32"):
        raise JobError(f"train.precision = {train.precision!r} must be bf16, fp16 or fp32")
    copies = candidate.micro_batch_size * candidate.data_parallel_size
    if train.global_batch_size % copies:
        raise JobError(
            f"train.global_batch_size = {train.global_batch_size} must be a multiple of "
            f"micro_batch_size * data_parallel_size = {copies}"
        )
    chunks = 2 * candidate.context_parallel_size
    if candidate.context_parallel_size > 1 and train.seq_length % chunks:
        raise JobError(
            f"train.seq_length = {train.seq_length} must be a multiple of 2 * context_parallel_size = {chunks}"
        )
    if candidate.use_recompute and candidate.recompute_granularity is None:
        raise JobError("candidate.use_recompute = true needs candidate.recompute_granularity")
    if model.num_moe_experts is not None:
        topk = model.moe_router_topk or 0
        if not 1 <= topk <= model.num_moe_experts:
            raise JobError(
                f"model.moe_router_topk = {model.moe_router_topk} must be between 1 and "
                f"model.num_moe_experts = {model.num_moe_experts}"
            )
        if (model.moe_first_dense_layers or 0) > model.num_layers:
            raise JobError("model.moe_first_dense_layers must not exceed model.num_layers")
    if candidate.num_layers_per_virtual_pipeline_stage is not None:
        _check_virtual_stages(model, candidate, candidate.num_layers_per_virtual_pipeline_stage)


def _check_virtual_stages(model: Model, candidate: Candidate, layers_per_chunk: int) -> None:
    stages = candidate.pipeline_model_parallel_size
    if stages == 1:
        raise JobError("candidate.num_layers_per_virtual_pipeline_stage needs pipeline_model_parallel_size > 1")
    if candidate.num_layers_in_first_pipeline_stage or candidate.num_layers_in_last_pipeline_stage:
        raise JobError(
            "candidate.num_layers_per_virtual_pipeline_stage cannot be combined with "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    if model.num_layers % (stages * layers_per_chunk):
        raise JobError(
            f"model.num_layers = {model.num_layers} must be a multiple of pipeline_model_parallel_size * "
            f"num_layers_per_virtual_pipeline_stage = {stages * layers_per_chunk}"
        )
