"""The engine `fsdp2`: rules, predictions, and memory as torch counts it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_models.layers import layer_counts
from flagcore_models.mixers.attention import Indexer
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_trainers.fsdp2.engine import FSDP2
from flagcore_trainers.fully_shard import (
    AC,
    COMPILE,
    CP,
    EP,
    MBS,
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
from flagcore_trainers.fully_shard.weights import layers_of_rank

from engines.models.tests.examples import layer_of
from flagcore import api
from flagcore.contracts import Platform
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Adapter
from flagcore.errors import LaunchError
from tests.checks import refuses
from tests.product.tasks import DENSE, EXPERTS, SHAPE, costs, task
from tests.tasks import LATENT

pytestmark = pytest.mark.spread

NEUTRAL = {knob.name: knob.neutral for knob in FSDP2.knobs}
UNTIED = replace(DENSE, untie_embeddings_and_output_weights=True)
MIXED = replace(EXPERTS, moe_shared_expert_intermediate_size=32, moe_first_dense_layers=1)
SPARSE = {"indexer": Indexer(heads=2, head_dim=16, top_k=8)}


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
    ],
)
def test_rules(values: dict[str, Any], rule: str | None) -> None:
    job = task(MIXED if EP in values else UNTIED, engine="fsdp2", precision="fp32")
    broken = [each.name for each in FSDP2.rules(job) if each.broken(columns(**values))[0]]
    assert broken == ([] if rule is None else [rule])


def test_there_are_no_trials(tmp_path: Path) -> None:
    with refuses("train.engine") as refused:
        FSDP2.ready(task(engine="fsdp2").spec)
    assert "engine: command" in refused.value.fix
    with refuses("train.command"):
        FSDP2.ready(task(engine="fsdp2", command=("train",)).spec)
    job = task(engine="fsdp2")
    platform = Platform(task=job, engine=FSDP2, costs=costs(job))
    with pytest.raises(LaunchError):
        FSDP2.launch(platform, Candidate.of(NEUTRAL), str(tmp_path), for_real=True)


def test_parts_that_are_not_predicted_are_reported_by_key() -> None:
    with refuses("model"):
        FSDP2.rules(task(replace(DENSE, layers=(layer_of(DENSE, SPARSE),) * 4), engine="fsdp2"))
    with refuses("train.command"):
        FSDP2.rules(task(engine="fsdp2", command=("train",)))
    assert FSDP2.warnings(task(replace(DENSE, mtp_num_layers=1), engine="fsdp2"))


def test_adapters_are_divided_if_the_spec_lists_it() -> None:
    job = task(engine="fsdp2", adapter=Adapter())
    (rule,) = (each for each in FSDP2.rules(job) if each.name == "adapters_alone")
    assert rule.broken(columns(**{TP: 2}))[0]
    for given in ({"baseline": {TP: 2}}, {"space": {TP: (1, 2)}}):
        planned = replace(job, spec=replace(job.spec, **given))
        assert "adapters_alone" not in {each.name for each in FSDP2.rules(planned)}


def test_experts_of_job_records_are_on_the_ranks_that_share_weights() -> None:
    job = task(MIXED, engine="fsdp2", devices=16, precision="bf16")
    records: list[dict[str, Any]] = [{}, {CP: 2}, {SHARD: 2}, {EP: 1}]
    completed = [FSDP2.published(job, record, "")[1] for record in records]
    assert [each[EP] for each in completed] == [4, 4, 2, 1]
    assert [each[REPLICATE] for each in completed] == [1, 1, 8, 1]
    assert [each[STATES] for each in completed] == ["bf16"] * 4
    compiled = FSDP2.published(job, {COMPILE: True}, "")[1]
    assert compiled[EP] == 1
    assert STATES not in compiled
    recipe, _values, noted, lines = FSDP2.published(job, {}, "")
    assert STATES in noted
    assert any(STATES in each for each in lines)
    times = [FSDP2.predict(each, columns(), costs(job)).step_time_s[0] for each in (recipe, job)]
    assert times[0] < times[1]


def test_notes_on_chunks_of_the_loss_save_its_memory() -> None:
    job = task(engine="fsdp2")
    notes = ("", "8 loss chunks", "0 loss chunks", "-8 loss chunks", "1.5 loss chunks")
    jobs = [FSDP2.published(job, {}, each)[0] for each in notes]
    plain, chunked, *others = (FSDP2.predict(each, columns(), costs(job)).peak_allocated_bytes[0] for each in jobs)
    assert chunked < plain
    assert others == [plain] * 3


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
    assert len(FSDP2.warnings(task(engine="fsdp2", engine_version=release))) == warnings


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


@pytest.mark.parametrize(("batch", "shard", "is_more"), [(8, 8, False), (64, 8, True), (8, 1, False)])
def test_programs_that_reduce_once_keep_whole_gradients(batch: int, shard: int, is_more: bool) -> None:
    job = task(UNTIED, engine="fsdp2", devices=shard, global_batch_size=batch)
    values = columns(**{SHARD: shard, REDUCE: "bf16"})
    each, once = (
        memory.of_rank(memory_job(job, values, fused_norm=False, whole_gradients=whole)) for whole in (False, True)
    )
    weights = each.static[0] / 16.0 * shard
    assert once.peak[0] - each.peak[0] == pytest.approx((2.0 - 4.0 / shard) * weights * is_more, rel=0.01)


@pytest.mark.parametrize(("values", "kept"), [({}, 1.0), ({AC: "full"}, 1.0), ({STATES: "bf16"}, 0.0)])
def test_autocast_keeps_casts_of_all_layers_of_fp32_weights(values: dict[str, Any], kept: float) -> None:
    """They stay until the loss is computed, with checkpoints, too (`findings/autocast_weight_copies.sh`)."""
    model = replace(UNTIED, num_layers=64)
    spec = task(model, engine="fsdp2", devices=1, global_batch_size=8)
    jobs = [memory_job(spec, columns(**values), fused_norm=False, casts=each) for each in (True, False)]
    with_casts, without = (memory.of_rank(replace(each, tokens=each.tokens / 1e6)).peak[0] for each in jobs)
    layers = 2.0 * layers_of_rank(jobs[0], layer_counts(model))[0][0]
    assert with_casts - without == pytest.approx(kept * layers, rel=0.15)


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "vocab_size": 1024}
DELTA = GatedDeltaNet(key_heads=1, value_heads=2, key_dim=256, value_dim=256)
RECURRENT = Mamba2(num_heads=2, head_dim=256, state_size=128, groups=1)
HYBRID = ((RECURRENT, ""), (None, "experts"), ({"window": 32}, ""))
WINDOWS = tuple(({"window": each},) for each in (128, None))
TIED, UNTIED_TABLES = ({"untie_embeddings_and_output_weights": each} for each in (False, True))
UNEQUAL = {"num_layers": 4, "layers": (({}, ""), ({}, ""), ({},), ({},))}
SINGLE = {"precision": "fp32"}
"""For layouts whose tensors have values: bf16 is slow on many processors."""
SHORT = {"sequence": 128, **SINGLE}
"""Few tokens, because the values are computed."""


@pytest.mark.parametrize(
    ("shape", "layout", "work"),
    [
        ({}, {"shard": 8, "checkpointing": "selective"}, {}),
        (TIED, {"shard": 4, "tensor": 2, "micro_batch": 2}, {"sequence": 512, **SINGLE}),
        (UNTIED_TABLES, {"shard": 2, "pipeline": 2, "state_dtype": "bf16"}, {}),
        (UNTIED_TABLES, {"shard": 4, "micro_batch": 4}, {"loss_parts": 8}),
        ({**UNEQUAL, **UNTIED_TABLES}, {"shard": 2, "pipeline": 2}, {}),
        ({"vocab_size": 65536, "logit_cap_bytes": 2}, {"shard": 4}, {}),
        ({"layers": WINDOWS}, {"shard": 4}, {}),
        ({**LATENT, "num_query_groups": 8}, {"shard": 4, "micro_batch": 2}, {}),
        ({"layers": ((DELTA,), ({},))}, {"shard": 4}, {"sequence": 64}),
        ({"layers": ((RECURRENT,), ({},))}, {"shard": 2, "state_dtype": "bf16"}, {"sequence": 64}),
        ({**EXPERTS, "num_layers": 3, "layers": HYBRID}, {"shard": 4, "expert": 2}, {"sequence": 32, **SINGLE}),
        pytest.param(EXPERTS, {"shard": 4, "checkpointing": "full"}, SHORT, marks=pytest.mark.long),
        ({"attention_output_gate": True}, {"shard": 4, "checkpointing": "full"}, SHORT),
        ({}, {"shard": 4, "checkpointing": "full"}, {"adapter": Adapter(rank=16)}),
        ({}, {"shard": 4, "reshard_after_forward": False}, {"adapter": Adapter(rank=64), "precision": "fp32"}),
        ({}, {"shard": 4}, {"adapter": Adapter(kind="dora", targets=("q_proj", "v_proj"))}),
        pytest.param({}, {"shard": 4}, {"adapter": Adapter(kind="dora")}, marks=pytest.mark.long),
    ],
)
@pytest.mark.costly
def test_memory_is_what_torch_counts(
    decoder: Any, shape: dict[str, Any], layout: dict[str, Any], work: dict[str, Any]
) -> None:
    decoder.assert_memory_of({"num_layers": 2, **shape}, layout, **work)


@pytest.mark.slow
def test_memory_of_the_layer_in_the_guide_is_what_torch_counts(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "write-a-layer.md").read_text("utf-8")
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    monkeypatch.setitem(decoder.MIXERS, "Echo", None)
    names["test_memory_of_echo_is_what_torch_counts"](decoder)


def test_a_spec_names_the_engine() -> None:
    train = {"engine": "fsdp2", "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    spec = {"model": SHAPE, "cluster": {"chip": "H100-SXM", "devices_per_node": 4}, "train": train}
    with refuses(f"auto_tuner.space.{SHARD}"):
        api.estimate({**spec, "auto_tuner": {"space": {SHARD: 0}}})
    assert api.estimate({**spec, "auto_tuner": {"space": {SHARD: 4}}}).search is None
