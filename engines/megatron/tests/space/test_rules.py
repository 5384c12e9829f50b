"""Each rule of Megatron with a candidate that breaks it, and one beside it that does not."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.space.knobs import candidate_columns
from flagcore_megatron.space.meshes import MESHES
from flagcore_megatron.space.options import options
from flagcore_megatron.space.split import Split
from flagcore_models.catalogue import public_model
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.mamba2 import Mamba2

from engines.models.tests.examples import layer_of, mixed
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore.tuner.stages.build import check
from tests.product import tasks

pytestmark = pytest.mark.together("megatron-core, imported")

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP, MBS = "context_parallel_size", "expert_model_parallel_size", "micro_batch_size"
SP, OPTIMIZER, VIRTUAL = "sequence_parallel", "use_distributed_optimizer", "num_layers_per_virtual_pipeline_stage"
FULL = {"use_recompute": True, "recompute_granularity": "full"}
SELECTIVE = {"use_recompute": True, "recompute_granularity": "selective"}
UNIFORM = {**FULL, "recompute_method": "uniform"}
BLOCK = {**FULL, "recompute_method": "block"}
LAYERS = "recompute_num_layers"

WIDE = dataclasses.replace(tasks.DENSE, num_layers=8, num_attention_heads=12, num_query_groups=6, ffn_hidden_size=96)
SHARED = dataclasses.replace(tasks.EXPERTS, moe_shared_expert_intermediate_size=66, moe_first_dense_layers=0)
LATENT = dataclasses.replace(tasks.DENSE, **tasks.LATENT)
WIDE_TASK = {"model": WIDE, "devices": 12, "global_batch_size": 24, "seq_length": 144}


def broken(values: dict[str, KnobValue], **of_task: Any) -> set[str]:
    """The names of the rules that a candidate breaks; its data parallelism is what the devices leave."""
    task = tasks.task(**of_task)
    return {rule.name for rule in check(ENGINE.columns(task, values), ENGINE.rules(task), ())[1]}


SHARDED = {OPTIMIZER: True, DP: 4}
GATHER = {"overlap_grad_reduce": True, "overlap_param_gather": True}
AWARE, OVERLAP = "use_precision_aware_optimizer", "overlap_moe_expert_parallel_comm"
FUSER = "use_transformer_engine_op_fuser"
SCHEDULE, LAYOUT = "pipeline_schedule", "pipeline_model_parallel_layout"
VPP, VIRTUAL = "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"


def experts(**settings: Any) -> dict[str, Any]:
    return {"model": tasks.EXPERTS, "settings": settings}


def dense(**shape: Any) -> dict[str, Any]:
    return {"model": dataclasses.replace(tasks.DENSE, **shape)}


NARROW, DEPTH = dataclasses.replace(tasks.EXPERTS, moe_ffn_hidden_size=34), dense(mtp_num_layers=1)
LOCAL = {"command": ("torchrun", "pretrain_gpt.py", "--transformer-impl", "local")}
EIGHT = {PP: 4, VIRTUAL: 1}


def scheduled(name: str, devices: int = 4, batch: int = 8) -> dict[str, Any]:
    """A job of 24 layers with a schedule."""
    return {**dense(num_layers=24), "devices": devices, "global_batch_size": batch, "settings": {SCHEDULE: name}}


MAMBA = layer_of(tasks.DENSE, Mamba2(num_heads=4, head_dim=8, state_size=8, groups=2), "")
HYBRID = dataclasses.replace(tasks.DENSE, layers=(MAMBA, layer_of(tasks.DENSE, None)) * (tasks.DENSE.num_layers // 2))
OLD_PATTERN = {"model": HYBRID, "engine_version": "0.16.0"}
DELTA = mixed(tasks.DENSE, GatedDeltaNet(key_heads=4, value_heads=4, key_dim=8, value_dim=8, kernel=4), 2)
OLD = {"engine_version": "0.17.1"}
INDEXED = {"model": public_model("deepseek-ai/DeepSeek-V3.2"), "devices": 4}
GATHERS = {**INDEXED, "settings": {"cp_comm_type": "all_gather"}}
BARS = {"settings": {"hybrid_layer_pattern": "M-|M-"}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "the sizes make up the devices": ("world_size", {DP: 1, TP: 2}, {DP: 2, TP: 2}, {}),
    "context parallelism counts among the devices": ("world_size", {DP: 4, CP: 2}, {DP: 2, CP: 2}, {}),
    "the batch is split evenly": ("global_batch_size", {MBS: 3}, {MBS: 2}, {}),
    "the batch of each replica": ("global_batch_size", {MBS: 4}, {MBS: 2}, {"devices": 4, "global_batch_size": 8}),
    "heads are split evenly": ("attention_heads", {TP: 3}, {TP: 4}, {"devices": 12}),
    "groups are split or copied": ("query_groups", {TP: 4}, {TP: 3}, WIDE_TASK),
    "groups may be fewer than the tensor devices": ("query_groups", {TP: 4}, {TP: 12}, WIDE_TASK),
    "keys and values are split evenly": ("qkv_width", {TP: 4}, {TP: 2}, dense(num_query_groups=1, kv_channels=3)),
    "the feed-forward width is split evenly": ("ffn_width", {TP: 4}, {TP: 2}, dense(ffn_hidden_size=130)),
    "the shared expert is split evenly": ("ffn_width", {TP: 4, SP: True}, {TP: 2, SP: True}, {"model": SHARED}),
    "mixers are split by groups of heads": ("mixer_heads", {TP: 4, PP: 1}, {TP: 2, PP: 1}, {"model": HYBRID}),
    "a pattern has no virtual stages without bars": ("hybrid_stages", {PP: 2, VIRTUAL: 1}, {PP: 2}, OLD_PATTERN),
    "bars of a pattern fit the pipeline": ("pipeline_stages", {PP: 4}, {PP: 2}, {"model": HYBRID, **BARS}),
    "bars set virtual stages": ("virtual_stages", {PP: 2, VPP: 2}, {PP: 2}, {"model": HYBRID, **BARS}),
    "bars move": ("pipeline_stages", {PP: 4}, {PP: 4, "layer_split": "balanced"}, {"model": HYBRID, **BARS}),
    "an expert is split evenly": ("expert_width", {TP: 4, SP: True}, {TP: 2, SP: True}, {"model": NARROW}),
    "context parallelism wants two chunks a device": ("context_length", {CP: 4}, {CP: 2}, {"seq_length": 100}),
    "a sequence on one device may be odd": ("context_length", {CP: 2}, {CP: 1}, {"seq_length": 101}),
    "local attention has no context parallelism": ("context_parallel_implementation", {CP: 2}, {CP: 1}, LOCAL),
    "states were not split by context": ("context_parallel_delta_net", {CP: 2}, {CP: 1}, {"model": DELTA, **OLD}),
    "indexers are not split by context": ("context_parallel_indexer", {CP: 2}, {CP: 1}, {**GATHERS, **OLD}),
    "indexers gather the context": (
        "context_parallel_indexer",
        {CP: 2},
        {CP: 1},
        {**INDEXED, "settings": {"cp_comm_type": "p2p"}},
    ),
    "a sequence is split evenly": ("sequence_length", {TP: 4, SP: True}, {TP: 4}, {"seq_length": 102}),
    "split experts need sequence parallelism": ("moe_sequence_parallel", {TP: 2}, {TP: 2, SP: True}, experts()),
    "layers are split evenly over the stages": ("pipeline_stages", {PP: 3}, {PP: 2}, {"devices": 6}),
    "virtual stages need a pipeline": ("virtual_needs_pipeline", {VIRTUAL: 2}, {PP: 2, VIRTUAL: 1}, {}),
    "virtual stages split a stage": ("virtual_stages", {PP: 2, VIRTUAL: 3}, {PP: 2, VIRTUAL: 2}, {"model": WIDE}),
    "interleaving wants groups": ("interleaved_microbatches", {**EIGHT, MBS: 4}, {**EIGHT, MBS: 2}, {"model": WIDE}),
    "a plain pipeline does not": ("interleaved_microbatches", {**EIGHT, MBS: 4}, {PP: 4, MBS: 4}, {"model": WIDE}),
    "expert parallelism needs experts": ("experts_exist", {EP: 2}, {EP: 1}, {}),
    "experts are split evenly": ("experts_divide", {EP: 8}, {EP: 4}, {"model": tasks.EXPERTS, "devices": 8}),
    "all sizes divide the world": ("expert_world_size", {TP: 2, EP: 4, SP: True}, {TP: 2, EP: 2, SP: True}, experts()),
    "recompute needs a granularity": ("recompute_granularity", {"use_recompute": True}, UNIFORM, {}),
    "selective takes no method": ("selective_recompute", {**SELECTIVE, "recompute_method": "block"}, SELECTIVE, {}),
    "selective recompute takes no number": ("selective_recompute", {**SELECTIVE, LAYERS: 1}, SELECTIVE, {}),
    "full recompute needs a method": ("recompute_method", {**FULL, LAYERS: 1}, {**UNIFORM, LAYERS: 1}, {}),
    "full recompute needs a number": ("recompute_num_layers", UNIFORM, {**UNIFORM, LAYERS: 1}, {}),
    "a stage has those layers": ("recompute_num_layers", {**BLOCK, PP: 2, LAYERS: 3}, {**BLOCK, PP: 2, LAYERS: 2}, {}),
    "uniform chunks fill a stage": ("uniform_recompute", {**UNIFORM, LAYERS: 3}, {**UNIFORM, LAYERS: 2}, {}),
    "uniform chunks fill a virtual stage": (
        "uniform_recompute",
        {**UNIFORM, PP: 2, VIRTUAL: 2, LAYERS: 4},
        {**UNIFORM, PP: 2, VIRTUAL: 2, LAYERS: 2},
        {"model": WIDE},
    ),
    "depths are recomputed singly": ("multi_token_recompute", {**UNIFORM, LAYERS: 2}, {**UNIFORM, LAYERS: 1}, DEPTH),
    "block recompute leaves depths out": ("multi_token_recompute", {**UNIFORM, LAYERS: 2}, {**BLOCK, LAYERS: 2}, DEPTH),
    "the last chunk may be shorter": (
        "uniform_recompute",
        {**UNIFORM, LAYERS: 3},
        {**UNIFORM, LAYERS: 2},
        {"space": {LAYERS: (2, 3)}, "engine_version": "0.16.1"},
    ),
    "block recompute need not fill a stage": ("uniform_recompute", {**UNIFORM, LAYERS: 3}, {**BLOCK, LAYERS: 3}, {}),
    "gathered weights need shards": ("overlap_param_gather", {}, SHARDED, experts(**GATHER)),
    "gathered fp8 weights need shards": ("fp8_param_gather", {}, SHARDED, experts(fp8_param_gather=True)),
    "a precision-aware optimizer needs shards": (AWARE, {}, SHARDED, experts(**{AWARE: True})),
    "overlap needs split sequences": ("tp_comm_overlap", {TP: 2}, {TP: 2, SP: True}, experts(tp_comm_overlap=True)),
    "fused experts are whole": (FUSER, {TP: 2, SP: True, EP: 2}, {EP: 2}, experts(**{FUSER: True})),
    "experts overlap between virtual stages": (OVERLAP, {EP: 2, PP: 2}, {EP: 2}, experts(**{OVERLAP: True})),
    "torch's FSDP has no stages": ("use_torch_fsdp2", {PP: 2}, {DP: 4}, experts(use_torch_fsdp2=True)),
    "torch's FSDP has no expert ranks": ("use_torch_fsdp2", {EP: 2}, {}, experts(use_torch_fsdp2=True)),
    "torch's FSDP shards by itself": ("use_torch_fsdp2", SHARDED, {DP: 4}, experts(use_torch_fsdp2=True)),
    "Muon was not sharded": ("optimizer", SHARDED, {DP: 4}, {**experts(optimizer="muon"), "engine_version": "0.17.0"}),
    "a stage that offloads exists": ("offload_stages", {}, {PP: 2}, experts(offload_stages="1")),
    "a layout fits the pipeline": ("pipeline_stages", {PP: 4}, {PP: 2}, experts(**{LAYOUT: "Ett|ttL"})),
    "a layout sets virtual stages": ("virtual_stages", {PP: 2, VIRTUAL: 1}, {PP: 2}, experts(**{LAYOUT: "Et|t|t|tL"})),
    "interleaving needs virtual stages": (SCHEDULE, {PP: 2}, {PP: 2, VIRTUAL: 1}, scheduled("interleaved")),
    "ZB-H1 has no virtual stages": (SCHEDULE, {PP: 2, VPP: 2}, {PP: 2}, scheduled("zb-h1")),
    "GPipe has no virtual stages": (SCHEDULE, {PP: 2, VPP: 4}, {PP: 2}, scheduled("gpipe")),
    "ZB-V has two virtual stages": (SCHEDULE, {PP: 2, VPP: 4}, {PP: 2, VPP: 2}, scheduled("zb-v")),
    "ZB-V sets its virtual stages": (SCHEDULE, {PP: 2, VPP: 4}, {PP: 2}, scheduled("zb-v")),
    "DualPipe has even micro-batches": (SCHEDULE, {PP: 4, MBS: 2}, {PP: 4, MBS: 1}, scheduled("dualpipe", 4, 18)),
    "DualPipe has even stages": (SCHEDULE, {PP: 3}, {PP: 1}, scheduled("dualpipe", 3, 12)),
    "DualPipe fills each stage twice": (SCHEDULE, {PP: 4, MBS: 4}, {PP: 4, MBS: 3}, scheduled("dualpipe", 4, 24)),
    "DualPipeV has two, even or not": (SCHEDULE, {PP: 3, MBS: 9}, {PP: 3, MBS: 1}, scheduled("dualpipev", 3, 27)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_refuses_its_bad_candidate_and_accepts_the_good_one(name: str) -> None:
    rule, bad, good, of_task = CASES[name]
    assert rule in broken(bad, **of_task)
    assert rule not in broken(good, **of_task)


def test_newer_releases_shard_muon() -> None:
    assert "optimizer" not in broken(SHARDED, **experts(optimizer="muon"), engine_version="0.18.0")


@pytest.mark.parametrize(
    ("sharded", "scope", "found"), [(True, "attn", {OVERLAP}), (False, "attn", set()), (True, "", set())]
)
def test_sharded_experts_overlap_without_graphs_of_layers(sharded: bool, scope: str, found: set[str]) -> None:
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope} if scope else {}
    assert broken({EP: 2}, **experts(**{OVERLAP: True}, use_megatron_fsdp=sharded, **graphs)) == found


def test_a_fork_states_the_layers_of_stages_and_brings_context_parallelism() -> None:
    own = "--context-parallel-algo ulysses_cp_algo --num-layer-list 1,3 --moe-token-dispatcher-type alltoall_seq"
    job: dict[str, Any] = {"model": tasks.EXPERTS, "command": (*LOCAL["command"], *own.split())}
    found = options(tasks.task(**job))
    assert (found.cp_comm, found.dispatcher) == ("a2a", "alltoall")
    assert Split.from_task(tasks.task(**job)).layout_layers == (1, 3)
    assert not broken({PP: 2, CP: 2}, **job)
    assert broken({PP: 4}, **job) == {"pipeline_stages", "listed_stages"}
    assert "listed_stages" in broken({PP: 1}, **job)  # a rank would build the layers of its own number only


@pytest.mark.parametrize("release", [None, "0.17.1", "0.19.0"])
def test_given_chunks_need_not_divide_the_layers_since_0_17(release: str | None) -> None:
    assert "uniform_recompute" not in broken({**UNIFORM, LAYERS: 3}, space={LAYERS: (3,)}, engine_version=release)
    task = tasks.task(engine_version=release)
    task = dataclasses.replace(task, spec=dataclasses.replace(task.spec, baseline={LAYERS: 3}))
    columns = ENGINE.columns(task, {**UNIFORM, LAYERS: 3})
    assert "uniform_recompute" not in {rule.name for rule in check(columns, ENGINE.rules(task), ())[1]}


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in ENGINE.rules(tasks.task())} <= {rule for rule, *_ in CASES.values()}


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_1f1b_has_any_number_of_virtual_stages(virtual: int) -> None:
    assert broken({PP: 2, VPP: virtual}, **scheduled("1f1b")) == set()


def test_experts_may_be_split_over_more_devices_than_data_parallelism_has() -> None:
    assert broken({TP: 1, PP: 2, CP: 2, EP: 2}, model=tasks.EXPERTS) == set()


def test_latent_attention_follows_its_heads() -> None:
    assert "attention_heads" in broken({TP: 8}, model=LATENT, devices=8)
    assert broken({TP: 4}, model=LATENT) == set()


CONFIG = {
    "heads": ({TP: 3}, {"tensor_model_parallel_size": 3}),
    "groups": ({TP: 4}, {"tensor_model_parallel_size": 4}),
    "no tensor split": ({TP: 2}, {"tensor_model_parallel_size": 2}),
    "sequence parallel": ({TP: 2, SP: True}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "no experts": ({EP: 2}, {"expert_model_parallel_size": 2}),
    "full without method": ({**FULL, LAYERS: 1}, {"recompute_granularity": "full", LAYERS: 1}),
    "full without number": (UNIFORM, {"recompute_granularity": "full", "recompute_method": "uniform"}),
    "full": ({**UNIFORM, LAYERS: 2}, {"recompute_granularity": "full", "recompute_method": "uniform", LAYERS: 2}),
    "selective with number": ({**SELECTIVE, LAYERS: 1}, {"recompute_granularity": "selective", LAYERS: 1}),
    "selective": (SELECTIVE, {"recompute_granularity": "selective"}),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", CONFIG)
def test_megatron_core_itself_agrees(name: str) -> None:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    values, fields = CONFIG[name]
    shape = {"num_layers": 8, "hidden_size": 96, "num_attention_heads": 12, "num_query_groups": 6}
    accepted = True
    try:
        config.TransformerConfig(**shape, ffn_hidden_size=96, **fields)
    except ValueError:
        accepted = False
    assert (broken(values, **WIDE_TASK) == set()) is accepted


@pytest.mark.long
@pytest.mark.parametrize(("micro", "data"), [(3, 2), (2, 2), (8, 1), (5, 1)])
def test_megatron_core_itself_agrees_on_the_batch(micro: int, data: int) -> None:
    batches = pytest.importorskip("megatron.core.num_microbatches_calculator")
    accepted = True
    try:
        batches.ConstantNumMicroBatchesCalculator(8, micro, data, False, 0)
    except AssertionError:
        accepted = False
    assert ("global_batch_size" not in broken({MBS: micro, DP: data})) is accepted


MERGED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sequence parallelism of one device": ({SP: True}, {}, {}),
    "distributed optimizer of one replica": ({TP: 4, OPTIMIZER: True}, {TP: 4}, {}),
    "expert parallelism of a dense model": ({EP: 4}, {}, {}),
    "virtual stages without a pipeline": ({VIRTUAL: 2}, {}, {}),
    "one virtual stage": ({PP: 2, VIRTUAL: 2}, {PP: 2}, {}),
    "granularity without recompute": ({"use_recompute": False, "recompute_granularity": "full"}, {}, {}),
    "method without recompute": ({"recompute_method": "block"}, {}, {}),
    "number without recompute": ({LAYERS: 2}, {}, {}),
    "selective with a method and a number": ({**SELECTIVE, "recompute_method": "block", LAYERS: 2}, SELECTIVE, {}),
    "block of every layer": ({**BLOCK, LAYERS: 4}, {**UNIFORM, LAYERS: 1}, {}),
    "block of every layer of a stage": ({**BLOCK, PP: 2, LAYERS: 2}, {**UNIFORM, PP: 2, LAYERS: 1}, {}),
}
DISTINCT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sequence parallelism": ({TP: 2, SP: True}, {TP: 2}, {}),
    "distributed optimizer over context parallelism": ({TP: 2, CP: 2, OPTIMIZER: True}, {TP: 2, CP: 2}, {}),
    "expert parallelism": ({EP: 2}, {EP: 1}, {"model": tasks.EXPERTS}),
    "two virtual stages": ({PP: 2, VIRTUAL: 1}, {PP: 2}, {}),
    "chunks of one and of two layers": ({**UNIFORM, LAYERS: 1}, {**UNIFORM, LAYERS: 2}, {}),
    "block of some layers": ({**BLOCK, LAYERS: 3}, {**UNIFORM, LAYERS: 1}, {}),
}


def canonical(values: dict[str, KnobValue], of_task: dict[str, Any]) -> dict[str, int]:
    task: Task = tasks.task(**of_task)
    columns, _ = check(ENGINE.columns(task, values), (), ENGINE.merges(task))
    return {knob: int(np.asarray(column)[0]) for knob, column in columns.items()}


@pytest.mark.parametrize("name", MERGED | DISTINCT)
def test_only_equivalent_candidates_are_merged(name: str) -> None:
    one, other, of_task = (MERGED | DISTINCT)[name]
    assert (canonical(one, of_task) == canonical(other, of_task)) == (name in MERGED)


def test_layers_per_virtual_stage_exclude_a_separate_first_stage() -> None:
    values = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    columns = candidate_columns({**values, "num_layers_in_first_pipeline_stage": 2})
    rule = next(rule for rule in ENGINE.rules(tasks.task()) if rule.name == "virtual_stages")
    assert rule.broken(columns).tolist() == [True]
    assert rule.broken(candidate_columns(values)).tolist() == [False]


def test_a_stage_uses_one_kind_of_chip() -> None:
    def refused(*devices: int) -> list[int]:
        groups = tuple(NodeGroup(chip=tasks.CHIP, nodes=1, devices_per_node=count) for count in devices)
        task = dataclasses.replace(tasks.task(), cluster=Cluster(groups=groups))
        rule = next(rule for rule in ENGINE.rules(task) if rule.name == "stages_in_one_group")
        none = np.zeros(1, dtype=np.int64)
        return [size for size in range(1, 17) if rule.broken({PP: np.array([size]), MESHES: none})[0]]

    assert refused(8, 8) == list(range(1, 17, 2))
    assert refused(8, 4) == [size for size in range(1, 17) if size % 3]
    assert refused(8, 4, 4) == [size for size in range(1, 17) if size % 4]
    assert refused(2, 6) == [size for size in range(1, 17) if size % 4]
    assert "stages_in_one_group" not in {rule.name for rule in ENGINE.rules(tasks.task())}


@pytest.mark.parametrize(("settings", "kept"), [({}, 0), (GATHER, 1)])
def test_distributed_optimizer_of_one_rank_stays_where_a_setting_needs_it(settings: Any, kept: int) -> None:
    task = tasks.task(settings=settings, command=("train",))
    values = candidate_columns({TP: 4, OPTIMIZER: True})
    columns, broken = check(values, ENGINE.rules(task), ENGINE.merges(task))
    assert broken == []
    assert int(columns[OPTIMIZER][0]) == kept
