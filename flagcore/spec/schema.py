"""The pydantic models of a spec file: one class per section, with a docstring for each key.

Rules on several keys are in `convert`. The sections for serving are in `serve_schema`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, create_model

from flagcore.domain.knob import Knob
from flagcore.domain.spec import Control as ControlSpec
from flagcore.domain.spec import Precision
from flagcore.spec.knobs import baseline_section, settings_section, space_section
from flagcore.spec.validate import BYTES_PATTERN, M, Section

MAX_DEVICES = 1_000_000
MIN_MEMORY, MAX_MEMORY = 1 << 20, 1 << 50

Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
NoDevices = Annotated[int, Field(ge=0, le=MAX_DEVICES)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
NoLayers = Annotated[int, Field(ge=0, le=10_000)]
Size = Annotated[int, Field(ge=1, le=2**31)]
NoSize = Annotated[int, Field(ge=0, le=2**31)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0, le=1_000)]
Seconds = Annotated[float, Field(gt=0, le=100_000_000)]
Wait = Annotated[float, Field(ge=0, le=86_400)]
Steps = Annotated[int, Field(ge=2, le=1_000_000)]
NoSteps = Annotated[int, Field(ge=0, le=1_000_000)]
PlannedSteps = Annotated[int, Field(ge=1, le=1_000_000_000)]
Trials = Annotated[int, Field(ge=1, le=1_000_000)]
Probes = Annotated[int, Field(ge=0, le=1_000)]
Repeats = Annotated[int, Field(ge=0, le=1_000)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
Value = Annotated[str, Field(max_length=100_000)]
ModelPath = Annotated[str, Field(min_length=1, max_length=4096, examples=["./Qwen3-8B"])]
Folder = Annotated[str, Field(min_length=1, max_length=4096, examples=["../training"])]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Amount = Annotated[str, Field(pattern=BYTES_PATTERN, examples=["4GiB"])]
Rate = Annotated[float, Field(ge=1_000_000, le=10**15)]
Latency = Annotated[float, Field(gt=0, le=1)]
Speed = Annotated[float, Field(ge=0.01, le=100)]
Price = Annotated[float, Field(ge=0, le=1_000_000)]
Bytes = Annotated[int, Field(ge=MIN_MEMORY, le=MAX_MEMORY)]

_CONTROL = ControlSpec()


class Shape(Section):
    """The architecture of a transformer. Sizes are numbers of elements."""

    name: Word = "inline"
    """Name of the model in reports."""
    num_layers: Layers
    """Number of transformer layers without multi-token prediction layers."""
    hidden_size: Size
    """Width of the residual stream."""
    ffn_hidden_size: Size
    """Width of a dense layer's feed-forward network."""
    num_attention_heads: Size
    """Number of query heads."""
    num_query_groups: Size | None = None
    """Number of key and value heads; null: the number of query heads."""
    kv_channels: Size | None = None
    """Width of one head; null: hidden_size / num_attention_heads."""
    vocab_size: Size
    """Number of tokens in the vocabulary, before padding."""
    gated_linear_unit: bool = True
    """Whether the feed-forward network has a gate (SwiGLU, GeGLU)."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output head has its own weights."""
    qk_layernorm: bool = False
    """Whether queries and keys are normalized."""
    add_qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    num_moe_experts: Size | None = None
    """Number of routed experts of an MoE layer; null: a dense model."""
    moe_router_topk: NoSize | None = None
    """Number of experts per token."""
    moe_ffn_hidden_size: Size | None = None
    """Width of one routed expert; null: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: NoSize | None = None
    """Total width of the shared experts; null or 0: none."""
    moe_first_dense_layers: NoLayers | None = None
    """Number of leading layers that are dense."""
    multi_latent_attention: bool = False
    """Whether attention is multi-head latent attention (MLA)."""
    q_lora_rank: Size | None = None
    """MLA: rank of the query projection; null: full rank."""
    kv_lora_rank: Size | None = None
    """MLA: rank of the projection of keys and values."""
    qk_head_dim: Size | None = None
    """MLA: width of the part of a query or key head without position."""
    qk_pos_emb_head_dim: Size | None = None
    """MLA: width of the part of a query or key head with the position."""
    v_head_dim: Size | None = None
    """MLA: width of a value head."""
    mtp_num_layers: NoLayers | None = None
    """Number of multi-token prediction layers."""


class NodesSection(Section):
    """Identical nodes."""

    chip: Word
    """Name or alias of a chip of any plugin."""
    nodes: Devices = 1
    """Number of hosts."""
    devices_per_node: Literal["auto"] | Devices = "auto"
    """Devices per host; auto: the detected number, the slots of the hostfile, or the usual number for the chip."""
    memory_per_device: Bytes | Amount | None = None
    """Memory per device that a trial may use, in bytes or with a unit; null: all of it."""
    cpus_per_node: Devices | None = None
    """CPUs (hardware threads, as `nproc` prints) per host that servers may use, for predictions; null: those of this
    host if it has the devices, otherwise enough."""
    nic_bytes_per_second: Rate | None = None
    """Network bandwidth per device (400 Gbit/s is 5.0e+10); null: the value of the chip's plugin."""
    nic_latency_seconds: Latency | None = None
    """Seconds until a small message arrives on another host; null: 20 µs, as of InfiniBand."""
    price_per_device_hour: Price | None = None
    """Price of one device for an hour, in any currency, for the cost of tokens and of `planned_steps`."""


class GroupSection(NodesSection):
    """Identical nodes of a heterogeneous cluster."""

    name: Name | None = None
    """Name of the group in meshes and tables, and the `type` of its hosts in the host file; null: `chip`."""
    speed: Speed = 1
    """Speed of the devices relative to the chip, such as 0.5 for processors with half of the clock rate."""
    envs: dict[str, Value | int] = Field(default={})
    """Environment variables of trials on the group's hosts, in addition to `envs` of the spec, which they override."""


class ClusterSection(NodesSection):
    """The hardware to tune for."""

    chip: Word = "auto"
    """Name or alias of a chip of any plugin; auto: detected on this machine."""
    hostfile: Text | None = None
    """File with one `host slots=8` per line, relative to the spec's folder; a trial uses all hosts, or `nodes`.
    With different `type=CHIP`, each type is a group."""
    spares: NoDevices = 0
    """Number of spare hosts, which replace hosts that fail."""
    min_nodes: Devices | None = None
    """If hosts fail and no spare is left, trials use fewer data-parallel replicas on at least this number of hosts."""
    host_envs: dict[str, dict[str, Value | int]] = Field(default={})
    """Environment variables of trials on single hosts of `hostfile`, by host. They override those of the spec and of
    the host's group."""
    groups: Annotated[list[GroupSection], Field(min_length=1)] | None = None
    """Groups of nodes with different chips, in rank order, instead of the other keys except `hostfile` and
    `host_envs`; null: those of the types in `hostfile`, or identical nodes."""


class TrainJob(Section):
    """Keys of a training job in specs and job records."""

    engine: Word
    """Name of the training engine."""
    seq_length: Size
    """Tokens per sample."""
    global_batch_size: Size
    """Samples per step, over all devices."""
    precision: Literal["auto"] | Precision
    """Number format of the matrix products; auto: the fastest in which all chips train, of bf16, fp16 and fp32."""
    attention: Literal["flash", "unfused"] = "flash"
    """Attention kernel: fused (flash), or storing the scores in memory (unfused)."""
    implementation: Literal["local", "transformer_engine"] | None = None
    """Implementation of the layers; null: the engine's default."""


class TrainSection(TrainJob):
    """The training job."""

    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Your launch command as a list of words, run without a shell; null: flagcore's trial program."""
    directory: Folder | None = None
    """Working directory of `command`; null: the folder of the spec file."""
    engine_version: Word | None = None
    """Version of the engine that `command` starts, such as 0.12.0; null: the installed one."""
    settings: Any = Field(default={})
    """Settings of the engine that are the same for all candidates."""


class BudgetSection(Section):
    """Budgets of any search."""

    max_time_per_task: Seconds | None = _CONTROL.max_time_per_task
    """Wall-clock limit of one trial, in seconds; null: derived from its prediction, 1200 s for servers."""
    max_time: Seconds | None = _CONTROL.max_time
    """Wall-clock limit of the whole search, in seconds; null: none."""
    disk_limit: Bytes | Amount | None = _CONTROL.disk_limit
    """Maximum size of a trial's folder, in bytes or with a unit; null: 2 GiB."""
    device_wait: Wait = _CONTROL.device_wait
    """Seconds that a trial waits for devices that other programs use before it fails."""
    max_trials: Trials = _CONTROL.max_trials
    """Maximum number of trials."""
    parallel_trials: Literal["auto"] | Trials = _CONTROL.parallel_trials
    """Maximum number of parallel trials, each on its own devices or hosts; auto: as many as the devices allow."""
    repeats: Repeats = _CONTROL.repeats
    """Minimum number of times that the baseline, the best and its rivals run again at the end."""
    run_best: bool = _CONTROL.run_best
    """Whether the best configuration is started at the end."""
    use_experience: bool = _CONTROL.use_experience
    """Whether measurements of earlier runs on the same chip correct the predictions."""


class ControlSection(BudgetSection):
    """Budgets of the search."""

    train_iters: Steps = _CONTROL.train_iters
    """Steps per trial."""
    max_step_time: Seconds | None = _CONTROL.max_step_time
    """Longer steps run with a smaller global batch, and their time is scaled; null: all steps are whole."""
    warmup_iters: NoSteps = _CONTROL.warmup_iters
    """Warm-up steps of a trial, which are not measured; fewer than train_iters."""
    fidelity: Literal["estimate", "probe", "run"] = "run"
    """Fidelity of trials: predictions only, single ranks on one device, or the whole job on all devices."""
    trial_nodes: Devices | Annotated[list[Devices], Field(min_length=1)] | None = None
    """Nodes of a trial, with fewer data-parallel replicas: in the search, then in repeats; null: all of the cluster."""
    warm_start: bool = _CONTROL.warm_start
    """Whether, on a CPU, trials of flagcore's program are forked from a process that has imported its modules."""
    compare_hosts: bool = _CONTROL.compare_hosts
    """Whether to compare the speed of devices and networks of hosts before the first trial."""
    probes: Probes = _CONTROL.probes
    """Number of candidates to probe on one device before the first run."""
    planned_steps: PlannedSteps | None = _CONTROL.planned_steps
    """Planned steps of the job; the search ends when no trial is expected to save more time in them than it takes."""


class SearchSection(Section):
    """Settings of every search."""

    strategy: Word = "learned"
    """Name of the search strategy: learned, predicted, random, tpe, gp, or an installed one."""
    launcher: Word = "local"
    """Name of the launcher that starts trials; absent: local, or with several nodes the launcher of the allocation."""


class TunerSection(SearchSection):
    """The search."""

    space: Any = Field(default={})
    """The search space."""
    baseline: Any = None
    """The configuration to which the gain is relative; null: an expert's rule of thumb."""
    control: ControlSection = ControlSection()
    """Budget of the search."""
    objective: Literal["tokens_per_second_per_device", "step_time_s", "cost"] = "tokens_per_second_per_device"
    """The figure to optimize: tokens per second and device (maximized), seconds per step (minimized), or cost. All
    candidates use all devices, so the one with the most tokens per second has the lowest cost of tokens."""


class CommonSection(Section):
    """Sections of all specs."""

    model: ModelPath | Shape
    """Path of a Hugging Face directory, config.json or GGUF file, relative to the spec, or an inline shape."""
    cluster: Literal["auto"] | ClusterSection = ClusterSection()
    """The hardware; absent: detected on this machine; auto: all hosts of the allocation that flagcore runs in."""
    envs: dict[str, Value | int] = Field(default={})
    """Environment variables of each trial, in addition to those of plugins."""
    action: Literal["auto_tune"] | None = None
    """Optional; the only value is auto_tune."""


class Document(CommonSection):
    """A tuning task: model, cluster, training job and search."""

    train: TrainSection
    """The training job, which is the same in all trials."""
    auto_tuner: TunerSection = TunerSection()
    """The search; absent: all legal candidates within the default budgets."""


@lru_cache(maxsize=64)
def document_of(engine: str, knobs: tuple[Knob, ...]) -> type[Document]:
    """Return the pydantic model of a document for a training engine with these knobs."""
    space, baseline, settings = space_section(knobs), baseline_section(knobs), settings_section(knobs)
    train = with_fields(TrainSection, settings=(settings, settings()))
    tuner = with_fields(TunerSection, space=(space, space()), baseline=(baseline | None, None))
    return with_fields(Document, train=(train, ...), auto_tuner=(tuner, tuner()))


def with_fields(section: type[M], suffix: str = "", **fields: Any) -> type[M]:
    """Return `section` with `suffix` added to its name and other types of some fields; their descriptions are kept."""
    for name, (kind, default) in fields.items():
        text = section.model_fields[name].description
        extra: dict[str, JsonValue] | None = {"default": {}} if name == "settings" else None
        fields[name] = (kind, Field(default, description=text, json_schema_extra=extra))
    result: type[M] = create_model(section.__name__ + suffix, __base__=section, __doc__=section.__doc__, **fields)
    return result
