"""Settings that a space compares: accepted, legal per candidate, predicted per candidate, passed, read back. What a
plan assumes: the settings of recipes, each for the candidates with which it is legal."""

import shlex
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_megatron.space import production
from flagcore_megatron.space.flags import flags
from flagcore_megatron.space.knobs import BY_NAME, SETTINGS, SPACE_KNOBS
from flagcore_megatron.space.meshes import CP, MESHES, TP
from flagcore_models.catalogue import public_model

from engines.megatron.tests.mixed.test_replicas import job
from engines.models.tests.examples import layer_of
from flagcore.contracts import Platform
from flagcore.domain.chip import Source
from flagcore.domain.engine import RefusedValues, Stack
from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import SettingValue, Spec, Task
from flagcore.domain.work import Lengths
from flagcore.spec.convert import parse_spec
from flagcore.tuner.effects import effects_of
from flagcore.tuner.stages.build import build, legality
from flagcore.tuner.stages.complete import with_plugin_knobs
from flagcore.tuner.stages.launch import planned_launch
from flagcore.tuner.stages.predict import predict
from tests.checks import refuses
from tests.product import tasks

ONE: dict[str, Any] = {knob.name: (knob.neutral,) for knob in SPACE_KNOBS}
"""A space of one candidate."""


def task_of(space: dict[str, Any], settings: dict[str, Any] | None = None, **changes: Any) -> Task:
    task = tasks.task(**{"space": ONE | {"data_parallel_size": (4,)} | space, **changes})
    train = replace(task.spec.train, settings=settings or {}, command=("pretrain_gpt.py",))
    task = replace(task, spec=replace(task.spec, work=train))
    return with_plugin_knobs(tasks.platform(task)).task


def rows(task: Task) -> list[dict[str, Any]]:
    legal = legality(tasks.platform(task))
    space = build(legal.axes, legal.rules, legal.merges)
    return [space.candidate(row).as_dict() for row in range(len(space))]


def values(task: Task, *names: str) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in names) for row in rows(task)}


def test_rules_hold_for_each_combination() -> None:
    names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    space: dict[str, Any] = dict.fromkeys(names, (False, True))
    found = values(task_of(space), *space)
    gathers = {row for row in found if row[2]}
    assert gathers == {(True, True, True)}
    assert len(found - gathers) == 4


def test_a_setting_may_need_another_that_is_compared_too() -> None:
    space = {
        "use_distributed_optimizer": (True,),
        "use_precision_aware_optimizer": (False, True),
        "optimizer_cpu_offload": (False, True),
        "exp_avg_dtype": (None, "bf16"),
    }
    found = values(task_of(space), *("use_precision_aware_optimizer", "optimizer_cpu_offload", "exp_avg_dtype"))
    assert {row for row in found if not row[0]} == {(False, False, None)}
    assert len({row for row in found if row[0]}) == 4


def test_a_value_that_no_combination_can_have_is_an_error() -> None:
    with refuses("auto_tuner.space.optimizer_cpu_offload", True):
        rows(task_of({"optimizer_cpu_offload": (False, True)}))
    assert rows(task_of({"optimizer_cpu_offload": "auto"}))[0]["optimizer_cpu_offload"] is False


@pytest.mark.parametrize(
    ("space", "settings", "key"),
    [
        ({"overlap_grad_reduce": (False, True)}, {"overlap_grad_reduce": True}, "train.settings.overlap_grad_reduce"),
        ({"pipeline_model_parallel_layout": "auto"}, {}, "auto_tuner.space.pipeline_model_parallel_layout"),
    ],
)
def test_a_setting_is_compared_or_given_and_listed_without_auto(space: Any, settings: Any, key: str) -> None:
    with refuses(key):
        task_of(space, settings)


def test_settings_of_experts_stay_off_in_a_dense_model() -> None:
    space = {"moe_grouped_gemm": "auto", "moe_token_dispatcher_type": "auto"}
    assert values(task_of(space), *space) == {(False, None)}


def test_the_expert_tensor_size_depends_on_the_candidate() -> None:
    space = {
        "data_parallel_size": (2,),
        "tensor_model_parallel_size": (2,),
        "expert_model_parallel_size": (1, 2, 4),
        "sequence_parallel": (True,),
        "expert_tensor_parallel_size": (1, 2),
    }
    found = values(task_of(space, model=tasks.EXPERTS), "expert_model_parallel_size", "expert_tensor_parallel_size")
    assert found == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}


def test_a_layout_holds_for_its_own_pipeline_size() -> None:
    layers = "t" * tasks.DENSE.num_layers
    half = tasks.DENSE.num_layers // 2
    space = {
        "data_parallel_size": (2, 4),
        "pipeline_model_parallel_size": (1, 2),
        "pipeline_model_parallel_layout": (None, f"E{layers[:half]}|{layers[half:]}L"),
    }
    found = values(task_of(space), "pipeline_model_parallel_size", "pipeline_model_parallel_layout")
    assert {(size, layout is not None) for size, layout in found} >= {(1, False), (2, False), (2, True)}


SWITCHES: dict[str, Any] = {
    "data_parallel_size": (1, 2),
    "tensor_model_parallel_size": (2, 4),
    "sequence_parallel": (True,),
    "use_distributed_optimizer": (True,),
    "overlap_grad_reduce": (False, True),
    "tp_comm_overlap": (False, True),
    "moe_grouped_gemm": (False, True),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "fp8_format": (None, "hybrid"),
    "cross_entropy_loss_fusion": (False, True),
}


def test_a_candidate_is_predicted_as_a_job_with_its_settings() -> None:
    task = task_of(SWITCHES, model=tasks.EXPERTS)
    legal = legality(tasks.platform(task))
    space = build(legal.axes, legal.rules, legal.merges)
    assert len(space) == 2 * 96
    found = predict(tasks.platform(task), space)
    for row in range(0, len(space), 17):
        candidate = space.candidate(row).as_dict()
        settings = {name: candidate[name] for name in SWITCHES if name in NAMES and candidate[name] is not None}
        single = task_of({}, settings, model=tasks.EXPERTS)
        columns = ENGINE.columns(single, {n: v for n, v in candidate.items() if n not in NAMES})
        expected = ENGINE.predict(single, columns, tasks.costs(single))
        np.testing.assert_equal(found.step_time_s[row], expected.step_time_s[0])
        assert found.peak_allocated_bytes[row] == expected.peak_allocated_bytes[0]


NAMES = {knob.name for knob in SETTINGS}


def test_a_candidate_is_started_with_its_settings(tmp_path: Path) -> None:
    task = task_of(SWITCHES, model=tasks.EXPERTS)
    expected = {"overlap_grad_reduce": True, "moe_token_dispatcher_type": "flex", "fp8_format": "hybrid"}
    expected["moe_grouped_gemm"] = False
    candidate = next(row for row in rows(task) if expected.items() <= row.items())
    argv = planned_launch(tasks.platform(task), Candidate.of(candidate), str(tmp_path)).argv
    assert {"--overlap-grad-reduce", "--moe-flex-dispatcher-backend"} <= set(argv)
    assert argv[argv.index("--fp8-format") + 1] == "hybrid"
    assert "--moe-grouped-gemm" not in argv


def test_settings_are_read_back_from_the_printed_arguments(tmp_path: Path) -> None:
    printed = {
        "overlap_grad_reduce": "True",
        "fp8": "hybrid",
        "exp_avg_dtype": "torch.bfloat16",
        "recompute_modules": "['mlp', 'core_attn']",
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": "2",
    }
    lines = [f"  {name} {'.' * 20} {value}" for name, value in printed.items()]
    steps = [f" iteration {n}/ 5 | elapsed time per iteration (ms): 100.0 | lm loss: 1.0E+00 |" for n in range(1, 6)]
    (tmp_path / "stdout.log").write_text("\n".join([*lines, *steps]))
    expected: dict[str, Any] = {
        "overlap_grad_reduce": False,
        "fp8_format": "hybrid",
        "exp_avg_dtype": "bf16",
        "recompute_modules": "core_attn,mlp",
        "moe_token_dispatcher_type": "flex",
        "expert_tensor_parallel_size": None,
    }
    found = ENGINE.read(task_of({}), Candidate.of(expected), str(tmp_path)).effective
    assert {name: value for name, value in expected.items() if found.get(name, value) != value} == {
        "overlap_grad_reduce": False,
        "moe_token_dispatcher_type": "flex",
    }


TUNED = (
    "overlap_grad_reduce overlap_param_gather tp_comm_overlap fp8_format fp8_recipe moe_grouped_gemm "
    "moe_token_dispatcher_type moe_flex_dispatcher_backend recompute_modules expert_tensor_parallel_size "
    "cross_entropy_loss_fusion optimizer_cpu_offload use_precision_aware_optimizer gradient_accumulation_fusion "
    "cuda_graph_impl cuda_graph_scope pipeline_model_parallel_layout pipeline_schedule"
)


@pytest.mark.parametrize("name", shlex.split(TUNED))
def test_common_settings_can_be_listed_and_are_off_by_default(name: str) -> None:
    knob = BY_NAME[name]
    listed: dict[str, list[Any]] = {
        "flag": [True, False],
        "word": [None, *knob.words],
        "words": [None, *knob.words[:2]],
        "int": [None, 2],
        "text": [None, "1f1b"],
    }
    spec = spec_of(space={name: listed[knob.kind]}, baseline={name: listed[knob.kind][0]})
    assert spec.space[name] == tuple(dict.fromkeys(listed[knob.kind]))
    assert spec.baseline == {name: listed[knob.kind][0]}
    assert knob.neutral in (None, False) or name == "gradient_accumulation_fusion"
    if knob.auto is not None:
        assert spec_of(space={name: "auto"}).space[name] == "auto"


def test_several_words_are_one_value_of_a_space() -> None:
    spec = spec_of(space={"recompute_modules": ["mlp,core_attn", ["moe_act"], None]})
    assert spec.space["recompute_modules"] == ("core_attn,mlp", "moe_act", None)
    assert spec_of(space={"recompute_modules": "mlp core_attn"}).space["recompute_modules"] == ("core_attn,mlp",)


def test_recompute_of_the_attention_core_alone_is_pruned_for_each_value() -> None:
    modules = (None, "core_attn", "layernorm,mlp")
    selective = {"use_recompute": (True,), "recompute_granularity": ("selective",)}
    task = task_of({**selective, "recompute_modules": modules})
    task = replace(task, spec=replace(task.spec, work=replace(task.spec.train, attention="flash")))
    (rule,) = ENGINE.pruning_rules(task)
    space = build((legal := legality(tasks.platform(task))).axes, legal.rules, legal.merges)
    pruned = rule.prunes(space.columns(), predict(tasks.platform(task), space))
    found = {space.candidate(row).as_dict()["recompute_modules"]: bool(pruned[row]) for row in range(len(space))}
    assert found == {None: True, "core_attn": True, "layernorm,mlp": False}


def test_the_trial_program_refuses_values_that_it_cannot_run() -> None:
    task = task_of({"tp_comm_overlap": (False, True)})
    task = replace(task, spec=replace(task.spec, work=replace(task.spec.train, command=None)))
    with refuses("train.settings.tp_comm_overlap"):
        ENGINE.ready(task.for_engine(effects_of(task, {"tp_comm_overlap": True})).spec)
    work = replace(spec_of().train, lengths=Lengths(values=(64, 128)))
    with refuses("train.lengths"):
        ENGINE.ready(replace(spec_of(), work=work))
    ENGINE.ready(replace(spec_of(), work=replace(work, lengths=None)))


def spec_of(**tuner: Any) -> Spec:
    data = {
        "model": tasks.SHAPE,
        "cluster": {"chip": "auto"},
        "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "bf16"},
        "auto_tuner": tuner,
    }
    return parse_spec(data, file="spec.yaml", base=Path(), engines=tasks.ENGINES)


CHIP = tasks.chip(bf16=9e14, fp8=2e15)
TWO_TOKENS = replace(tasks.EXPERTS, mtp_num_layers=1)
SPACE = {
    "micro_batch_size": (1,),
    "context_parallel_size": (1, 2),
    "recompute_num_layers": (1,),
    "layer_split": (None,),
}
OVERLAP = "overlap_moe_expert_parallel_comm"


def platform(model: Model = tasks.DENSE, *refused: RefusedValues, own: Any = (), **job: Any) -> Platform:
    """The platform of a spec before anything is assumed, on a chip whose vendor names transformer-engine."""
    source = Source(kind="datasheet", detail="a guide")
    stack = Stack(implementation="transformer_engine", settings=dict(own), source=source)
    found = tasks.platform(tasks.task(model, chip=CHIP, **{"space": SPACE, **job}))
    return replace(found, support=replace(found.support, stack=stack), value_rules=tuple(refused))


def plan(model: Model = tasks.DENSE, *refused: RefusedValues, **job: Any) -> Task:
    return production.as_in_production(platform(model, *refused, **job)).task


def assumed(model: Model = tasks.DENSE, *refused: RefusedValues, **job: Any) -> dict[str, SettingValue]:
    return dict(plan(model, *refused, **job).spec.train.assumed)


def typed(task: Task, settings: dict[str, SettingValue]) -> Task:
    """A task in which a user wrote these settings."""
    return replace(task, spec=replace(task.spec, work=replace(task.spec.train, settings=settings, assumed={})))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=pytest.mark.long)])
@pytest.mark.parametrize("model", [tasks.DENSE, tasks.EXPERTS, TWO_TOKENS], ids=["dense", "experts", "mtp"])
@pytest.mark.parametrize("own", [{}, {"cuda_graph_impl": "transformer_engine"}], ids=["plain", "graphs"])
def test_each_candidate_is_predicted_with_the_settings_that_are_legal_with_it(
    own: dict[str, str], model: Model, precision: str
) -> None:
    task = plan(model, precision=precision, own=own)
    legal = legality(tasks.platform(task))
    space = build(legal.axes, legal.rules, legal.merges)
    bare = legality(tasks.platform(typed(task, {"expert_tensor_parallel_size": 1} if model.num_moe_experts else {})))
    assert len(space) == len(build(bare.axes, bare.rules, bare.merges))
    costs, everything = platform(model).costs, np.arange(len(space))
    found = ENGINE.predict(task, space.columns(everything), costs)
    kinds: dict[tuple[tuple[str, SettingValue], ...], list[int]] = defaultdict(list)
    for row in everything:
        kinds[tuple(ENGINE.plans.assumed(task, space.candidate(int(row))).items())].append(int(row))
    assert len(kinds) > 2
    for settings, some in kinds.items():
        strict, columns = typed(task, dict(settings)), space.columns(np.array(some))
        assert not any(rule.broken(columns).any() for rule in legality(tasks.platform(strict)).rules)
        single = ENGINE.predict(strict, columns, costs)
        np.testing.assert_allclose(found.step_time_s[some], single.step_time_s)
        np.testing.assert_allclose(found.static_bytes[some], single.static_bytes)
        np.testing.assert_allclose(found.activation_bytes[some], single.activation_bytes)


def test_a_named_setting_takes_precedence_over_contradicting_notes() -> None:
    fused_loss = {"cross_entropy_loss_fusion", "cross_entropy_fusion_impl"}
    assert assumed(settings={"overlap_grad_reduce": False}).keys() == {"tp_comm_overlap"} | fused_loss
    found = assumed(tasks.EXPERTS, settings={"moe_grouped_gemm": False, "moe_shared_expert_overlap": True})
    assert not found.keys() & {"moe_grouped_gemm", "moe_token_dispatcher_type", "recompute_modules"}
    fused = [assumed(replace(tasks.EXPERTS, name=name)).get("moe_router_fusion") for name in ("GLM-4.5", "Qwen3")]
    assert fused == [None, True]
    assert OVERLAP not in assumed(tasks.EXPERTS, space={**SPACE, OVERLAP: (False, True)})


SPARSE = cast("Model", public_model("deepseek-ai/DeepSeek-V3.2"))
RELEASES = {**dict.fromkeys(("0.12.3", "0.16.1", "0.17.1", "0.18.0"), "te"), "0.15.0+flagscale": "te"}
RELEASES |= dict.fromkeys(("0.18.1", "0.18.2", "0.19.0", None, *known_releases()[-1:]), "native")
"""Releases, and the fused loss that their own check accepts: it asserts against that of Transformer Engine from 0.18.1$
(`validate_args` of core_v0.18.0, core_v0.18.2, core_v0.19.0, main)."""


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", [tasks.DENSE, TWO_TOKENS, SPARSE], ids=["dense", "experts", "indexers"])
def test_what_a_plan_assumes_is_legal_in_its_release(model: Model, release: str | None) -> None:
    task = plan(model, engine_version=release)
    words = flags({}, typed(task, dict(task.spec.train.assumed)).spec, None)
    assert release_table(release).parse(words)[1] == []
    assert task.spec.train.assumed["cross_entropy_fusion_impl"] == RELEASES[release]
    assert ("--no-rope-fusion" in words) is (model is SPARSE)


@pytest.mark.parametrize("release", [each for each in RELEASES if each])
def test_the_loss_that_a_release_refuses_is_an_error(release: str) -> None:
    task = typed(plan(engine_version=release), {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"})
    is_refused = RELEASES[release] == "native"
    with refuses("train.settings.cross_entropy_fusion_impl", "te") if is_refused else nullcontext():
        ENGINE.check_values(task.spec)


def test_settings_that_the_chip_or_the_release_lacks_are_left_out() -> None:
    flex = RefusedValues(name="no_link", knob="settings.moe_token_dispatcher_type", values=("flex",), reason="no link")
    assert "moe_token_dispatcher_type" not in assumed(tasks.EXPERTS, flex)
    assert OVERLAP not in assumed(tasks.EXPERTS, engine_version="0.12.0")
    alltoall = {"tp_comm_overlap": False, "moe_token_dispatcher_type": "alltoall", "recompute_modules": None}
    assert assumed(tasks.EXPERTS, own=alltoall).items() >= {"moe_token_dispatcher_type": "alltoall"}.items()
    assert not assumed(tasks.EXPERTS, own=alltoall).keys() & {"recompute_modules", "tp_comm_overlap"}
    assert not assumed(own=alltoall).keys() & alltoall.keys()
    none = RefusedValues(name="old", knob="implementation", values=("transformer_engine",), reason="too old")
    assert plan(tasks.EXPERTS, none).spec.train.implementation is None


def test_graphs_of_a_model_with_experts_leave_the_experts_out() -> None:
    own = {"cuda_graph_impl": "transformer_engine"}
    scope = str(assumed(tasks.EXPERTS, own=own)["cuda_graph_scope"]).split(",")
    assert "attn" in scope
    assert "moe" not in scope
    assert "cuda_graph_scope" not in {**assumed(own=own), **assumed(tasks.EXPERTS)}


def test_a_model_with_a_pattern_of_layers_does_not_overlap_its_experts() -> None:
    layers = (layer_of(tasks.EXPERTS), layer_of(tasks.EXPERTS, None, "experts")) * 2
    hybrid = replace(tasks.EXPERTS, layers=layers)
    assert OVERLAP in assumed(tasks.EXPERTS)
    assert OVERLAP not in assumed(hybrid)
    task = tasks.task(hybrid, settings={OVERLAP: True})
    assert OVERLAP in {rule.name for rule in legality(tasks.platform(task)).rules}


def test_naming_the_layers_that_are_assumed_changes_nothing() -> None:
    named = plan(tasks.EXPERTS, implementation="transformer_engine").spec
    assert named == plan(tasks.EXPERTS).spec
    assert named.train.assumed


@pytest.mark.parametrize("job", [{"command": ("pretrain_gpt.py",)}, {"implementation": "local"}])
def test_a_spec_that_names_its_settings_is_unchanged(job: dict[str, Any]) -> None:
    arguments = platform(**job)
    assert production.as_in_production(arguments) is arguments


def test_the_command_of_a_plan_has_the_assumed_flags_that_are_legal(tmp_path: Path) -> None:
    arguments = production.as_in_production(platform(tasks.EXPERTS, precision="fp8"))
    neutral = {axis.knob: axis.neutral for axis in legality(tasks.platform(arguments.task)).axes}
    knobs = {**neutral, "expert_model_parallel_size": 4}
    shards = {"data_parallel_size": 4, "use_distributed_optimizer": True}
    plain = {**knobs, "data_parallel_size": 4, "use_recompute": True, "recompute_granularity": "full"}

    def flags(values: dict[str, Any]) -> set[str]:
        launch = ENGINE.launch(arguments, Candidate.of(values), str(tmp_path), for_real=True)
        return set(shlex.split(shlex.join(launch.argv)))

    gated = {"--overlap-param-gather", "--fp8-param-gather", "--overlap-moe-expert-parallel-comm"}
    always = {"--moe-grouped-gemm", "--overlap-grad-reduce", "--fp8-recipe", "--transformer-impl"}
    assert flags({**knobs, **shards}) >= gated | always
    assert flags(plain) >= always
    assert not flags(plain) & gated


@pytest.mark.parametrize(
    ("knobs", "count"), [({}, 0), ({TP: 8, CP: 2}, 0.2), ({TP: 16}, 2.1), ({CP: 4}, 5.1), ({TP: 16, CP: 4}, 7.2)]
)
def test_tp_over_nodes_and_short_context_parallel_ranks_are_unusual(knobs: dict[str, int], count: float) -> None:
    task = tasks.task(devices=8, seq_length=8192)
    columns = ENGINE.columns(task, knobs)
    predictions = ENGINE.predict(task, columns, tasks.costs(task))
    assert ENGINE.plans.unusual(task, columns, predictions) == pytest.approx([count])


def test_short_context_parallel_ranks_of_a_mesh_are_unusual() -> None:
    texts = ("fast cp2 dp2 + slow dp4", "fast cp4 | slow dp4", "fast dp4 | slow dp4")  # the last two split the data
    task, costs = job(2, *texts, devices=4, model=tasks.DENSE)  # 4,096 tokens
    columns = [ENGINE.columns(task, {MESHES: text}) for text in (*texts, None)]
    weights = [ENGINE.plans.unusual(task, each, ENGINE.predict(task, each, costs)) for each in columns]
    assert np.concatenate(weights) == pytest.approx([5.1, np.inf, np.inf, 0])
