"""Settings that a space compares: accepted, legal per candidate, predicted per candidate, passed, read back."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.space.knobs import BY_NAME, SETTINGS, SPACE_KNOBS

from flagcore.domain.lengths import Lengths
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Spec, Task
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
    for row in range(0, len(space), 7):
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
