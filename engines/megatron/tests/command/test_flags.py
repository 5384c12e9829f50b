"""The knobs in a user's own command: as flags, placeholders and environment variables."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.space.flags import flags
from flagcore_training.commands import environment, expand_command

from flagcore.domain.spec import Adapter, ClusterSpec
from flagcore.errors import LaunchError, SpecError
from tests.checks import refuses
from tests.product import tasks

PLAIN = tasks.candidate(data_parallel_size=4)


def test_disabled_knobs_have_no_flag_and_a_real_run_is_not_shortened() -> None:
    arguments = flags(PLAIN.as_dict(), tasks.task().spec, None)
    assert not {"--sequence-parallel", "--recompute-granularity", "--recompute-num-layers"} & set(arguments)
    assert not {"--num-layers-per-virtual-pipeline-stage", "--data-parallel-size", "--train-iters"} & set(arguments)
    assert "None" not in arguments


def test_knobs_with_a_value_and_the_steps_of_a_trial_are_flags() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 4}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    rich = tasks.candidate(**sizes, sequence_parallel=True, use_recompute=True, **recompute)
    words = flags(rich.as_dict(), tasks.task().spec, 5)
    values = {"seq_length": 128, "global_batch_size": 8, **sizes, **recompute, "train_iters": 5, "log_interval": 1}
    text = " ".join(words)
    assert all(f"--{name.replace('_', '-')} {value}" in text for name, value in values.items())
    assert "--sequence-parallel" in words


def test_flags_replace_their_placeholder_or_are_appended() -> None:
    arguments = ["--a", "1"]
    assert expand_command(["run", "{flags}", "--mine"], {}, arguments, "/f") == ("run", "--a", "1", "--mine")
    assert expand_command(["run", "--mine"], {}, arguments, "/f") == ("run", "--mine", "--a", "1")


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    command = ["t={tensor_model_parallel_size}", "{folder}/log", "m={recompute_method}", '{"json": 1}', "{unknown}"]
    expanded = expand_command(command, PLAIN.as_dict(), [], "/trial 1")
    assert expanded == ("t=1", "/trial 1/log", "m=", '{"json": 1}', "{unknown}")


def test_the_environment_has_every_knob_as_text() -> None:
    rich = tasks.candidate(micro_batch_size=4, sequence_parallel=True, recompute_method="uniform").as_dict()
    variables = environment(rich)
    assert len(variables) == len(rich)
    assert variables["FLAGCORE_MICRO_BATCH_SIZE"] == "4"
    assert (variables["FLAGCORE_SEQUENCE_PARALLEL"], variables["FLAGCORE_RECOMPUTE_METHOD"]) == ("1", "uniform")
    plain = environment(PLAIN.as_dict())
    assert (plain["FLAGCORE_SEQUENCE_PARALLEL"], plain["FLAGCORE_RECOMPUTE_METHOD"]) == ("0", "")


def test_a_users_command_runs_in_the_folder_of_its_spec(tmp_path: Path) -> None:
    platform = tasks.platform(tasks.task(command=("make", "train"), directory="/there"))
    planned = ENGINE.launch(platform, PLAIN, str(tmp_path))
    assert planned.argv[:2] == ("make", "train")
    assert "--train-iters" in planned.argv
    assert planned.directory == "/there"
    assert "--train-iters" not in ENGINE.launch(platform, PLAIN, str(tmp_path), for_real=True).argv


def test_the_trial_program_gets_its_job_as_a_file(tmp_path: Path) -> None:
    planned = ENGINE.launch(tasks.platform(tasks.task()), PLAIN, str(tmp_path))
    assert planned.argv[-1] == str(tmp_path / "job.json")
    assert (tmp_path / "job.json").exists()
    with pytest.raises(LaunchError, match="cannot be written"):
        ENGINE.launch(tasks.platform(tasks.task()), PLAIN, str(tmp_path / "missing"))


def test_trials_over_two_kinds_of_chips_are_refused_without_a_command() -> None:
    cluster = ClusterSpec(groups=(ClusterSpec(chip="a"), ClusterSpec(chip="b")))
    spec = dataclasses.replace(tasks.task().spec, cluster=cluster)
    with refuses("cluster.groups", ["a", "b"]) as refused:
        ENGINE.ready(spec)
    assert "flag estimate" in refused.value.fix
    ENGINE.ready(dataclasses.replace(spec, work=dataclasses.replace(spec.train, command=("run",))))


def test_settings_are_flags_once() -> None:
    settings = {
        "overlap_grad_reduce": True,
        "overlap_p2p_comm": False,
        "moe_grouped_gemm": False,
        "recompute_modules": "layernorm,mlp",
        "exp_avg_dtype": "bf16",
        "num_layers_in_first_pipeline_stage": 3,
        "moe_expert_imbalance": 1.5,
        "pipeline_schedule": "interleaved",
    }
    arguments = flags({}, tasks.task(settings=settings, command=("run", "--exp-avg-dtype", "bf16")).spec, None)
    assert arguments[4:] == [
        "--overlap-grad-reduce",
        "--no-overlap-p2p-communication",
        "--recompute-modules",
        "layernorm",
        "mlp",
        "--decoder-first-pipeline-num-layers",
        "3",
    ]


@pytest.mark.parametrize(
    ("job", "trial", "command"),
    [
        ({"settings": {"overlap_grad_reduce": True}}, True, True),
        ({"settings": {"overlap_grad_reduce": False}}, True, True),
        ({"settings": {"moe_token_dispatcher_type": "alltoall"}}, True, True),
        ({"settings": {"moe_token_dispatcher_type": "flex"}}, False, True),
        ({"settings": {"recompute_modules": "layernorm"}}, True, True),
        ({"settings": {"accumulate_allreduce_grads_in_fp32": True}}, True, True),
        ({"settings": {"grad_reduce_in_bf16": True}}, True, True),
        ({"settings": {"overlap_p2p_comm": False}}, True, True),
        ({"settings": {"tp_comm_overlap": True}}, False, True),
        ({"settings": {"moe_grouped_gemm": True}}, False, True),
        ({"settings": {"cp_comm_type": "p2p"}}, False, True),
        ({"settings": {"pipeline_schedule": "1f1b"}}, True, True),
        ({"settings": {"pipeline_schedule": "zb-h1"}}, False, False),
        ({"settings": {"offload_stages": "0"}}, False, False),
        ({"adapter": Adapter()}, False, True),
        ({"precision": "fp8"}, False, True),
        ({"attention": "unfused"}, False, True),
        ({"implementation": "transformer_engine"}, False, True),
    ],
)
def test_job_that_no_trial_can_run_is_refused_before_any(job: dict[str, Any], trial: bool, command: bool) -> None:
    (key,) = (".".join((name, *value)) if isinstance(value, dict) else name for name, value in job.items())
    for arguments, runs in ((None, trial), (("make", "train"), command)):
        spec = tasks.task(command=arguments, **job).spec
        if runs:
            ENGINE.ready(spec)
            continue
        with refuses(f"train.{key}"):
            ENGINE.ready(spec)


def test_trial_program_gets_the_settings_that_it_supports(tmp_path: Path) -> None:
    settings = {"recompute_modules": "layernorm,mlp", "expert_tensor_parallel_size": 1, "overlap_grad_reduce": True}
    ENGINE.launch(tasks.platform(tasks.task(settings=settings)), PLAIN, str(tmp_path))
    job = json.loads((tmp_path / "job.json").read_text())["candidate"]
    assert (job["recompute_modules"], job["expert_tensor_parallel_size"]) == (["layernorm", "mlp"], 1)
    assert (job["overlap_grad_reduce"], job["moe_token_dispatcher_type"]) == (True, "alltoall")


def test_the_trial_program_does_not_emulate_several_nodes_on_one() -> None:
    spec = tasks.task().spec
    with pytest.raises(SpecError) as refused:
        ENGINE.ready(dataclasses.replace(spec, cluster=ClusterSpec(nodes=2)))
    assert "cluster.nodes" in refused.value.key
