"""Small made-up tasks: a chip, a model, a cluster and what they cost."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from flagcore_testing import toy

from flagcore.api.inputs import SpecLike, loaded_plugins, read_spec
from flagcore.contracts import Costs, Platform, Problem, PruningRule, SearchContext, Telemetry
from flagcore.domain.chip import Chip, Device, DeviceUse, Fact, Link, Source
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model, Vision
from flagcore.domain.prediction import Belief, Prediction, Predictions
from flagcore.domain.space import Candidate, KnobValue, Legality, Space
from flagcore.domain.spec import ClusterSpec, Control, Spec, Task, TrainSpec
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.domain.work import Work
from flagcore.hooks import hookimpl
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.roofline import PlainMemory, Roofline
from flagcore.plugins import engine_of
from flagcore.tuner.stages.complete import complete
from flagcore.tuner.stages.prune import prune

SOURCE = Source(kind="datasheet", detail="made up for these tests")
CHIP = Chip(
    name="test-chip",
    vendor="test",
    aliases=("Test Accelerator 9000",),
    memory_bytes=Fact(value=80e9, source=SOURCE),
    memory_bandwidth_bytes_per_second=Fact(value=3e12, source=SOURCE),
    dense_flops_per_second={"bf16": Fact(value=900e12, source=SOURCE)},
    link=Link(name="fabric", topology="switch", bytes_per_second=Fact(value=400e9, source=SOURCE)),
)
SHAPE = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000}
"""An inline shape of a spec."""
LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
}
"""The shape of Llama 3 8B."""
ENGINES = {"toy": toy.ENGINE}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Service(Work):
    """A job that is not training: a service without steps."""

    kind = "serve"
    start_seconds = 1200.0
    default_objective = cheapest_objective = "output_tokens_per_s"
    has_steps = False

    precision: str = "bf16"
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cards: int | None = None


PLAIN_SPACE = {"use_distributed_optimizer": False, "use_recompute": False}
"""The space of a spec of the toy engine that varies only DP, TP, PP and the micro-batch size."""
DENSE = Model(
    name="dense",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    vocab_size=1000,
)
LATENT = {
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
"""The sizes of multi-latent attention of a model of 4 heads."""
VISION = Vision(  # the tower of Qwen2.5-VL-7B
    num_layers=32,
    full_layers=4,
    hidden_size=1280,
    num_heads=16,
    ffn_hidden_size=3420,
    gated_linear_unit=True,
    output_size=3584,
    patch_size=14,
    merge_size=2,
    min_pixels=3136,
    max_pixels=12845056,
    window_size=112,
)
EXPERTS = dataclasses.replace(DENSE, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32)


def chip(**rates: float) -> Chip:
    """Return the chip of tests with other dense rates, by number format."""
    facts = {name: Fact(value=rate, source=SOURCE) for name, rate in rates.items()}
    return dataclasses.replace(CHIP, dense_flops_per_second=facts)


def task(
    model: Model = DENSE,
    *,
    devices: int = 4,
    chip: Chip = CHIP,
    memory_bytes: int | None = None,
    control: Control | None = None,
    space: Mapping[str, Any] | None = None,
    **train: Any,
) -> Task:
    """A task on one node; `train` overrides seq_length 128, global_batch_size 8, bf16."""
    job = {"engine": "toy", "seq_length": 128, "global_batch_size": 8, "precision": "bf16", **train}
    spec = Spec(
        model=model, cluster=ClusterSpec(), work=TrainSpec(**job), control=control or Control(), space=space or {}
    )
    group = NodeGroup(chip=chip, nodes=1, devices_per_node=devices, memory_bytes=memory_bytes)
    return Task(spec=spec, cluster=Cluster(groups=(group,)))


def planned(spec: SpecLike) -> Platform:
    """The platform of a job that is only planned. Nothing is predicted."""
    read = read_spec(spec)
    with loaded_plugins(()) as loaded:
        return complete(read, loaded, engine_of(read.work), plan=True)


def costs(task: Task, capacity: float | None = 80e9) -> Costs:
    """The core's own models."""
    group = task.cluster.groups[0]
    return Costs(
        memory=PlainMemory(capacity=capacity),
        kernels=Roofline(chip=group.chip),
        collectives=Collectives(topology=topology_of(group)),
    )


def platform(task: Task, **changes: Any) -> Platform:
    """A platform without plugins' answers."""
    return Platform(task=task, **{"engine": toy.ENGINE, "costs": costs(task), **changes})


def problem(
    of: Platform, space: Space, predictions: Predictions, rules: Sequence[PruningRule] = (), **changes: Any
) -> Problem:
    """The problem of a task, with candidates that nothing but predictions and `rules` removed."""
    defaults = {
        "legality": Legality(axes=space.axes, rules=(), merges=()),
        "pruned": prune(space, predictions, rules),
        "baseline": space.candidate(0),
    }
    return Problem(platform=of, space=space, predictions=predictions, rules=tuple(rules), **{**defaults, **changes})


def with_task(context: SearchContext, task: Task, **changes: Any) -> SearchContext:
    """A context of a changed task."""
    of = dataclasses.replace(context.problem.platform, task=task, **changes)
    return dataclasses.replace(context, problem=dataclasses.replace(context.problem, platform=of))


def prediction(used: float = 1.0, capacity: float | None = 100.0, **time_s: float) -> Prediction:
    """A prediction of a step of these parts, which uses `used` bytes of everything."""
    total = sum(time_s.values())
    return Prediction(
        step_time_s=total,
        low_s=total,
        high_s=total,
        time_s=time_s,
        static_bytes=used,
        activation_bytes=0.0,
        peak_allocated_bytes=used,
        reserved_bytes=used,
        device_used_bytes=used,
        capacity_bytes=capacity,
        fits=True,
        worst_stage=0,
        model_flops=1.0,
    )


def belief(step_time_s: float, chance_to_fit: float = 1.0, **figures: float) -> Belief:
    """A corrected prediction without an interval."""
    times = {"step_time_s": step_time_s, "low_s": step_time_s, "high_s": step_time_s}
    return Belief(**times, chance_to_fit=chance_to_fit, **figures)


def plugin(**hooks: Callable[..., object]) -> SimpleNamespace:
    """A plugin of functions, by the names of their hooks without `flagcore_`."""
    return SimpleNamespace(**{f"flagcore_{name}": hookimpl(function) for name, function in hooks.items()})


def read(devices: Iterable[Device], readers: Iterable[Telemetry]) -> dict[str, Any]:
    """The devices of a platform, and the telemetry of the first ones."""
    found = tuple(devices)
    return {"devices": found, "telemetry": dict(zip(found, readers, strict=False))}


class Readings:
    """The telemetry of a device: its samples in order, the last one again and again. Exceptions are raised."""

    def __init__(self, *samples: Mapping[str, float] | Exception, **use: Any) -> None:
        self.samples, self.use = list(samples), lambda: DeviceUse(**use)

    def sample(self) -> Mapping[str, float]:
        answer = self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def candidate(**values: KnobValue) -> Candidate:
    """A candidate of the toy engine; knobs that are not given are neutral."""
    return Candidate.of({knob.name: values.get(knob.name, knob.neutral) for knob in toy.SPACE_KNOBS})


def trial(
    number: int,
    of: Candidate,
    step_s: float | None,
    *,
    spread_s: float = 0.0,
    rate: float | None = None,
    **changes: Any,
) -> Trial:
    """A trial of `of` that was measured at `step_s` seconds a step and `rate` tokens per second; without, it failed."""
    measurement = None
    if step_s is not None:
        rate = rate or 1.0 / step_s
        measurement = Measurement(
            step_times_s=(step_s,), step_time_s=step_s, spread_s=spread_s, tokens_per_second_per_device=rate
        )
    usual = {"role": Role.SEARCH, "state": TrialState.MEASURED if measurement else TrialState.FAILED}
    return Trial(**{"number": number, "candidate": of, "measurement": measurement, **usual, **changes})
