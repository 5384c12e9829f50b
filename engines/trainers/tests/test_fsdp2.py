"""The engine `fsdp2`: rules, memory as torch counts it, and trials on a CPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_models.mixers.short_convolution import ShortConvolution
from flagcore_trainers.fsdp2.engine import FIELDS, FSDP2
from flagcore_trainers.fully_shard import (
    AC,
    CP,
    EP,
    MBS,
    OFFLOAD,
    PP,
    REDUCE,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    SCHEDULES,
    SHARD,
    STATES,
    TP,
    memory,
)
from flagcore_trainers.fully_shard.predict import memory_job

from flagcore import api
from flagcore.contracts import Platform
from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.lengths import Lengths
from flagcore.domain.model import Attention, Layer, Mixer, Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Adapter
from flagcore.errors import LaunchError, SpecError
from flagcore.launchers.local import LocalLauncher
from tests.checks import refuses
from tests.launchers.processes import ended
from tests.product.tasks import DENSE, EXPERTS, SHAPE, costs, task
from tests.tasks import LATENT

pytestmark = pytest.mark.spread

NEUTRAL = {knob.name: knob.neutral for knob in FSDP2.knobs}
UNTIED = replace(DENSE, untie_embeddings_and_output_weights=True)
MIXED = replace(EXPERTS, moe_shared_expert_intermediate_size=32, moe_first_dense_layers=1)
OTHER = replace(DENSE, layers=(Layer(mixer=ShortConvolution(width=64)),) * 4)
CPU = EngineSupport(support=Support.YES, device_type="cpu", distributed_backend="gloo", shared_devices=True)


def columns(**values: Any) -> dict[str, Any]:
    given = {**NEUTRAL, **values}
    return {knob.name: np.array([knob.axis(()).encode(given[knob.name])]) for knob in FSDP2.knobs}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({SHARD: 4}, None),
        ({SHARD: 2, TP: 2}, None),
        ({SHARD: 2}, "world_size"),
        ({SHARD: 4, MBS: 4}, "global_batch_size"),
        ({TP: 4}, "tensor_parallel"),
        ({REPLICATE: 4}, "sharded_replicas"),
        ({SHARD: 4, REDUCE: "bf16"}, "all_in_fp32"),
        ({SHARD: 4, STATES: "bf16"}, "all_in_fp32"),
        ({PP: 4, RESHARD: False}, None),
        ({PP: 4}, "pipeline_weights"),
        ({PP: 4, RESHARD: False, SCHEDULE: "interleaved"}, "pipeline_layers"),
        ({PP: 4, RESHARD: False, MBS: 4}, "pipeline_microbatches"),
        ({PP: 2, SHARD: 2, RESHARD: False, SCHEDULE: "zbv", AC: "selective"}, "split_backward"),
        ({PP: 2, SHARD: 2, RESHARD: False, SCHEDULE: "dualpipev", AC: "full"}, "split_backward"),
        ({SHARD: 4, EP: 4, "compile": True}, None),
        ({SHARD: 2, REPLICATE: 2, EP: 4}, "expert_parallel"),
        ({SHARD: 4, AC: "selective", EP: 2}, "experts_alone"),
    ],
)
def test_rules(values: dict[str, Any], rule: str | None) -> None:
    job = task(MIXED if EP in values else UNTIED, engine="fsdp2", precision="fp32")
    broken = [each.name for each in FSDP2.rules(job) if each.broken(columns(**values))[0]]
    assert broken == ([] if rule is None else [rule])


def test_what_trials_cannot_run_is_reported_by_key() -> None:
    with refuses("model"):
        FSDP2.rules(task(replace(DENSE, moe_latent_size=16), engine="fsdp2"))
    with refuses("model"):
        FSDP2.ready(task(OTHER, engine="fsdp2").spec)
    assert FSDP2.task_warnings(task(replace(DENSE, mtp_num_layers=1), engine="fsdp2"))
    refused: list[dict[str, Any]] = [{"precision": "fp8"}, {"command": ("train",)}, {"adapter": Adapter(base="nf4")}]
    for train in (*refused, {"lengths": Lengths(values=(16, 64))}):
        with refuses(f"train.{next(iter(train))}"):
            FSDP2.ready(task(engine="fsdp2", **train).spec)
    with pytest.raises(SpecError):
        FSDP2.rules(task(engine="fsdp2", command=("train",)))


def test_adapters_are_divided_in_plans_only() -> None:
    job = task(engine="fsdp2", adapter=Adapter())
    (rule,) = (each for each in FSDP2.rules(job) if each.name == "adapters_alone")
    assert rule.broken(columns(**{TP: 2}))[0]
    for given in ({"baseline": {TP: 2}}, {"space": {TP: (1, 2)}}):
        planned = replace(job, spec=replace(job.spec, **given))
        assert "adapters_alone" not in {each.name for each in FSDP2.rules(planned)}
        with refuses(f"auto_tuner.{TP}"):
            FSDP2.ready(planned.spec)


def test_experts_of_job_records_are_on_the_ranks_that_share_weights() -> None:
    job = task(MIXED, engine="fsdp2", devices=16)
    records = [{}, {CP: 2}, {SHARD: 2}, {EP: 1}]
    completed = [FSDP2.published(job, record, "")[1] for record in records]
    assert [each[EP] for each in completed] == [4, 4, 2, 1]
    assert [each[REPLICATE] for each in completed] == [1, 1, 8, 1]


def test_job_records_that_do_not_fit_otherwise_recompute_all_layers() -> None:
    cluster = {"chip": "H100-SXM", "devices": 8, "devices_per_node": 8}
    train = {"engine": "fsdp2", "seq_length": 4096, "global_batch_size": 32, "precision": "bf16", "adapter": {}}
    record = {"id": "x", "kind": "train", "model": "meta-llama/Meta-Llama-3.1-70B", "cluster": cluster, "train": train}
    candidates: list[dict[str, Any]] = [{}, {AC: "full"}, {AC: "none"}]
    assumed, full, none = api.estimate_jobs(
        {**record, "candidate": {TP: 2, "micro_batch_size": 2, **each}} for each in candidates
    )
    assert assumed["memory"] == full["memory"]
    assert any(f"{AC} = full is assumed" in each for each in assumed["warnings"])
    assert (full["memory"]["fits"], none["memory"]["fits"]) == (True, False)


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_adapters_need_less_memory_and_more_with_their_rank(engine: str) -> None:
    cluster = {"chip": "H100-SXM", "devices": 1, "devices_per_node": 1}
    train = {"engine": engine, "seq_length": 4096, "global_batch_size": 2, "precision": "bf16"}
    record = {"id": "x", "kind": "train", "model": "Qwen/Qwen3-8B", "cluster": cluster, "candidate": {}}
    adapters: list[dict[str, Any]] = [{"kind": "qlora", "rank": 8}, {"targets": ["o_proj"]}, {}, {"rank": 64}]
    jobs = [{**record, "train": train}, *({**record, "train": {**train, "adapter": each}} for each in adapters)]
    full, quantized, few, lora, wide = (each["memory"] for each in api.estimate_jobs(jobs))
    assert [each["fits"] for each in (full, quantized, few, lora, wide)] == [False, True, True, True, True]
    assert quantized["static_gib"] < 0.6 * few["static_gib"]
    peaks = [each["peak_allocated_gib"] for each in (few, lora, wide, full)]
    assert peaks == sorted(peaks)


def test_job_records_share_weights_over_all_other_devices() -> None:
    train = {"engine": "fsdp2", "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    cluster = {"chip": "H100-SXM", "devices": 4, "devices_per_node": 4}
    record = {"id": "x", "kind": "train", "model": SHAPE, "cluster": cluster, "train": train, "candidate": {}}
    changes: list[dict[str, Any]] = [
        {"candidate": {TP: 2}},
        {"candidate": {TP: 2, SHARD: 2}},
        {"candidate": {PP: 4}, "model": {**SHAPE, "num_layers": 6, "untie_embeddings_and_output_weights": True}},
        {"candidate": {"virtual_pipeline_model_parallel_size": 2}},
        {"rank": 1},
        {"train": {**train, "adapter": {"base": "nf4"}}},
        {"train": {**train, "implementation": "local"}},
    ]
    short, whole, uneven, *refused, warned = api.estimate_jobs([{**record, **each} for each in changes])
    assert whole["status"] == "ok"
    assert short["step_time_s"] == whole["step_time_s"]
    assert uneven["status"] == "ok"
    assert any(each.startswith("6 layers") for each in uneven["warnings"])
    assert [each["status"] for each in refused] == ["invalid"] * 3
    for each, word in zip(refused, ("virtual_pipeline_model_parallel_size", "rank", "train.adapter.base"), strict=True):
        assert word in each["reason"]
    assert any("train.implementation = local" in each for each in warned["warnings"])


@pytest.mark.parametrize(("release", "warnings"), [("2.9", 0), ("banana", 1), ("2.1", 1)])
def test_a_release_is_one_of_torch(release: str, warnings: int) -> None:
    assert len(FSDP2.spec_warnings(task(engine="fsdp2", engine_version=release).spec)) == warnings


def test_no_candidates_have_no_predictions() -> None:
    job, none = task(engine="fsdp2"), {knob.name: np.array([], dtype=np.int64) for knob in FSDP2.knobs}
    assert FSDP2.predict(job, none, costs(job)).step_time_s.shape == (0,)


def test_predictions_follow_the_knobs() -> None:
    job = task(UNTIED, engine="fsdp2", devices=8, global_batch_size=16)

    def predicted(**values: Any) -> Any:
        return FSDP2.predict(job, columns(**{SHARD: 8, **values}), costs(job))

    plain = predicted()
    assert predicted(**{AC: "full"}).step_time_s > predicted(**{AC: "selective"}).step_time_s > plain.step_time_s
    assert predicted(**{RESHARD: False}).time_s["dp_comm_exposed_s"] < plain.time_s["dp_comm_exposed_s"]
    assert predicted(**{SHARD: 4, REPLICATE: 2}).static_bytes > plain.static_bytes
    assert predicted(compile=True).step_time_s < plain.step_time_s
    staged, looped = (predicted(**{SHARD: 4, PP: 2, RESHARD: False, SCHEDULE: name}) for name in SCHEDULES[:2])
    experts = task(MIXED, engine="fsdp2", devices=8, global_batch_size=16)
    whole, split = (FSDP2.predict(experts, columns(**{SHARD: 8, EP: size}), costs(experts)) for size in (1, 2))
    assert split.time_s["ep_comm_s"] > whole.time_s["ep_comm_s"] == 0
    assert staged.time_s["pp_bubble_s"] > looped.time_s["pp_bubble_s"] > 0
    assert staged.peak_allocated_bytes < looped.peak_allocated_bytes


def test_schedules_with_several_stages_keep_what_gloo_sends() -> None:
    job = task(UNTIED, engine="fsdp2", devices=8, global_batch_size=64)

    def peak(schedule: str, sends_stay: bool) -> float:
        values = columns(**{SHARD: 4, PP: 2, RESHARD: False, SCHEDULE: schedule})
        return float(memory.of_rank(memory_job(job, values, fused_norm=False, sends_stay=sends_stay)).peak[0])

    assert peak("interleaved", True) > peak("interleaved", False)
    assert peak("1f1b", True) == peak("1f1b", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "candidate"),
    [
        ({}, {"shard": 8, "checkpointing": "selective"}),
        ({"untie_embeddings_and_output_weights": False}, {"shard": 4, "tensor": 2, "micro_batch": 2}),
        ({"untie_embeddings_and_output_weights": True}, {"shard": 2, "pipeline": 2, "state_dtype": "bf16"}),
        ({"layers": tuple(Layer(mixer=Attention(window=each)) for each in (128, None))}, {"shard": 4}),
        ({**LATENT, "num_query_groups": 8}, {"shard": 4, "micro_batch": 2}),
    ],
)
def test_memory_is_what_torch_counts(shape: dict[str, Any], candidate: dict[str, Any]) -> None:
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    from engines.trainers.tests import counted, counted_stages

    job = counted.job({"num_layers": 2, **shape}, candidate)
    static, peak = counted_stages.counted(job, 1) if "pipeline" in candidate else counted.counted(job)
    assert counted.predicted(job) == (pytest.approx(static, rel=0.005), pytest.approx(peak, rel=0.03))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "candidate"),
    [
        (GatedDeltaNet(key_heads=1, value_heads=2, key_dim=256, value_dim=256), {"shard": 4}),
        (Mamba2(num_heads=2, head_dim=256, state_size=128, groups=1), {"shard": 2, "state_dtype": "bf16"}),
    ],
    ids=["delta", "mamba2"],
)
def test_memory_of_layers_with_states_is_what_torch_counts(mixer: Mixer, candidate: dict[str, Any]) -> None:
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    from engines.trainers.tests import counted

    layers = Layer(mixer=mixer), Layer(mixer=Attention())
    job = counted.job({"num_layers": 2, "layers": layers}, candidate, length=256)
    static, peak = counted.counted(job)
    assert counted.predicted(job) == (pytest.approx(static, rel=0.005), pytest.approx(peak, rel=0.03))


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "vocab_size": 1024}
HYBRID = (
    Layer(mixer=Mamba2(num_heads=2, head_dim=256, state_size=128, groups=1), feed_forward=""),
    Layer(mixer=None, feed_forward="experts"),
    Layer(mixer=Attention(window=64), feed_forward=""),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "candidate"),
    [
        ({**EXPERTS, "num_layers": 3, "layers": HYBRID}, {"shard": 4, "expert": 2}),
        ({**EXPERTS, "num_layers": 2}, {"shard": 4, "checkpointing": "full"}),
        ({"num_layers": 2, "attention_output_gate": True}, {"shard": 4, "checkpointing": "full"}),
    ],
    ids=["hybrid", "experts", "gate"],
)
def test_memory_of_experts_and_gates_is_what_torch_counts(shape: dict[str, Any], candidate: dict[str, Any]) -> None:
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    from engines.trainers.tests import counted

    job = counted.job(shape, candidate, length=128, precision="fp32")
    static, peak = counted.counted(job)
    assert counted.predicted(job) == (pytest.approx(static, rel=0.005), pytest.approx(peak, rel=0.03))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "candidate", "precision"),
    [
        (Adapter(rank=16), {"checkpointing": "full"}, "bf16"),
        (Adapter(rank=64), {"reshard_after_forward": False}, "fp32"),
        (Adapter(kind="dora", targets=("q_proj", "v_proj")), {}, "bf16"),
        (Adapter(kind="dora"), {}, "bf16"),
    ],
)
def test_memory_of_adapters_is_what_torch_counts(adapter: Adapter, candidate: dict[str, Any], precision: str) -> None:
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    from engines.trainers.tests import counted

    job = replace(counted.job({"num_layers": 2}, {"shard": 4, **candidate}, 1024, precision), adapter=adapter)
    static, peak = counted.counted(job)
    assert counted.predicted(job) == (pytest.approx(static, rel=0.005), pytest.approx(peak, rel=0.03))


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    """A launcher that forks trials, so that torch is imported once."""
    warm = LocalLauncher()
    yield warm
    warm.close()


def trial(
    launcher: LocalLauncher, folder: Path, model: Model = UNTIED, adapter: Adapter | None = None, **values: Any
) -> Any:
    """Run a trial of two ranks, and return its measurement."""
    job = task(model, devices=2, engine="fsdp2", seq_length=32, precision="fp32", adapter=adapter)
    folder.mkdir()
    candidate = Candidate.of({**NEUTRAL, **values})
    launch = FSDP2.launch(Platform(task=job, engine=FSDP2, costs=costs(job), support=CPU), candidate, str(folder))
    assert ended(launcher.start(launch), 120).code == 0, (folder / "stderr.log").read_text()
    measured = FSDP2.read(job, candidate, str(folder))
    effective = dict(measured.effective)
    assert effective.pop("precision") == "fp32"
    assert effective.items() <= candidate.as_dict().items()
    return measured


@pytest.mark.slow
def test_layouts_have_the_same_losses(launcher: LocalLauncher, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {SHARD: 2, MBS: 2, AC: "selective"},
        {TP: 2, MBS: 4, AC: "full"},
        {CP: 2, MBS: 8, RESHARD: False, OFFLOAD: True},
        {PP: 2, MBS: 2, RESHARD: False},
        {PP: 2, MBS: 2, RESHARD: False, SCHEDULE: "zbv"},
    ]
    first, *others = (trial(launcher, tmp_path / str(number), **values) for number, values in enumerate(layouts))
    assert first.losses[-1] < first.losses[0]
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-4)
    assert first.peak_allocated_bytes > 0
    adapters = [
        trial(launcher, tmp_path / kind, adapter=Adapter(kind=kind), **layouts[0] | {AC: "none"})
        for kind in ("lora", "dora")
    ]
    for each in adapters:
        assert each.losses[-1] < each.losses[0]
    alone, split = (trial(launcher, tmp_path / f"experts{size}", MIXED, **{SHARD: 2, EP: size}) for size in (1, 2))
    assert split.losses == pytest.approx(alone.losses, rel=1e-4)


@pytest.mark.slow
def test_tensor_parallel_norms_of_queries_have_the_same_losses(launcher: LocalLauncher, tmp_path: Path) -> None:
    model = replace(UNTIED, qk_layernorm=True)
    alone = trial(launcher, tmp_path / "alone", model, **{SHARD: 2, MBS: 2})
    for checkpointing in ("none", "selective", "full"):
        split = trial(launcher, tmp_path / checkpointing, model, **{TP: 2, MBS: 4, AC: checkpointing})
        assert split.losses == pytest.approx(alone.losses, rel=1e-4), checkpointing


def test_there_is_no_real_job(tmp_path: Path) -> None:
    job = task(engine="fsdp2")
    platform = Platform(task=job, engine=FSDP2, costs=costs(job))
    with pytest.raises(LaunchError):
        FSDP2.launch(platform, Candidate.of(NEUTRAL), str(tmp_path), for_real=True)
    FSDP2.launch(platform, Candidate.of(NEUTRAL), str(tmp_path))
    assert json.loads((tmp_path / "job.json").read_text())["candidate"].keys() == set(FIELDS.values())


@pytest.mark.parametrize(("offload", "backend"), [(False, "nccl"), (True, "cuda:nccl,cpu:gloo")])
def test_offloaded_gradients_have_collectives_of_the_host(offload: bool, backend: str, tmp_path: Path) -> None:
    job = task(engine="fsdp2")
    support = EngineSupport(support=Support.YES, device_type="cuda", distributed_backend="nccl")
    platform = Platform(task=job, engine=FSDP2, costs=costs(job), support=support)
    FSDP2.launch(platform, Candidate.of({**NEUTRAL, OFFLOAD: offload}), str(tmp_path))
    assert json.loads((tmp_path / "job.json").read_text())["device"]["backend"] == backend


def test_a_broken_job_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    words = [sys.executable, "-m", "flagcore_trainers.fsdp2", str(tmp_path / "job.json")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("invalid configuration:")


def test_a_spec_names_the_engine() -> None:
    train = {"engine": "fsdp2", "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    spec = {"model": SHAPE, "cluster": {"chip": "H100-SXM", "devices_per_node": 4}, "train": train}
    with refuses(f"auto_tuner.space.{SHARD}"):
        api.estimate({**spec, "auto_tuner": {"space": {SHARD: 0}}})
    api.estimate({**spec, "auto_tuner": {"space": {SHARD: 4}}})
