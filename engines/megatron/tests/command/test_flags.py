"""The knobs in a user's own command: as flags, placeholders and environment variables. The tables of Megatron-LM's
arguments, and how a command is read with them: as argparse does."""

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import ArgumentTable, known_releases, release_table, releases_with
from flagcore_megatron.space.flags import flags
from flagcore_training.commands import environment, expand_command

from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
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


@pytest.mark.parametrize(("device", "said"), [("cuda", False), ("cpu", True)])
def test_megatron_lm_starts_on_accelerators_only(tmp_path: Path, device: str, said: bool) -> None:
    platform = tasks.platform(tasks.task(), support=EngineSupport(support=Support.YES, device_type=device))
    assert ("accelerators" in ENGINE.launch(platform, PLAIN, str(tmp_path), for_real=True).missing) == said


def test_modules_of_the_vendor_that_the_program_must_import_are_named(tmp_path: Path) -> None:
    support = EngineSupport(support=Support.YES, device_type="npu", preload=("torch_acme", "acme.adaptor"))
    found = ENGINE.launch(tasks.platform(tasks.task(), support=support), PLAIN, str(tmp_path), for_real=True)
    assert "torch_acme, acme.adaptor" in found.missing


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


TINY = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --min-lr 1e-4 --log-interval 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 5000 --eval-iters 2 --eval-interval 1000 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--distributed-backend gloo --log-throughput"
)
PRINTED = """
  distributed_backend ............................. gloo
  eval_interval ................................... 1000
  eval_iters ...................................... 2
  global_batch_size ............................... 8
  gradient_accumulation_fusion .................... False
  hidden_size ..................................... 64
  log_interval .................................... 1
  log_throughput .................................. True
  lr .............................................. 0.001
  masked_softmax_fusion ........................... False
  max_position_embeddings ......................... 64
  micro_batch_size ................................ 1
  min_lr .......................................... 0.0001
  mock_data ....................................... True
  no_persist_layer_norm ........................... True
  num_attention_heads ............................. 4
  num_layers ...................................... 4
  seq_length ...................................... 64
  tokenizer_type .................................. NullTokenizer
  train_iters ..................................... 5
  transformer_impl ................................ local
  vocab_size ...................................... 5000
"""
"""What pretrain_gpt.py of the flag-scale 0.8.0 wheel printed for TINY, without what the command does not mention."""

COMMANDS = (
    "--micro-batch-size 2 --micro-batch-size 4",
    "--train-iters=5 --lr=-1 --seed -5",
    "--use-distributed-optimizer false",
    "--use-distributed-optimizer=false",
    "--bf16 --no-such-flag 3 --train-iters 7",
    "--no-such-flag=3 stray",
    "stray --bf16",
    "--train_iters 5",
    "--train-it 5",
    "--micro-batch-size",
    "--micro-batch-size two",
    "--micro-batch-size 1 2",
    "--lr --bf16",
    "--lr -x",
    "--recompute-granularity none",
    "--rampup-batch-size 4 4 16 --bf16",
    "--data-path 0.3 a 0.7 b --split 99,1,0",
    "--data-path --bf16",
    "--bf16 -- --train-iters 5",
    "--no-masked-softmax-fusion --sequence-parallel",
    "--tokenizer-model - --bf16",
    "--attention-backend flash",
    "--attention-backend=fast",
)


def parser_of(table: ArgumentTable) -> argparse.ArgumentParser:
    """Return a real argparse parser with the arguments of a table."""
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    for spec in {each.flags: each for each in table.by_flag.values()}.values():
        if spec.values == 0:
            parser.add_argument(*spec.flags, dest=spec.dest, action="store_const", const=spec.stores)
            continue
        changes: dict[str, Any] = {"nargs": None if spec.values == 1 else spec.values}
        if spec.values == "?":
            changes["const"] = spec.const
        if spec.appends:
            changes["action"] = "append"
        kind = {"int": int, "float": float, "bool": bool}.get(spec.type, str)
        parser.add_argument(*spec.flags, dest=spec.dest, type=kind, choices=spec.choices or None, **changes)
    return parser


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_read_as_argparse_reads_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = release_table("0.14")
    words = command.split()
    problems = table.parse(words)[1]
    try:
        parsed = vars(parser_of(table).parse_args(words))
    except SystemExit:
        assert problems, capsys.readouterr().err
    else:
        assert not problems
        assert table.effective(words) == {name: value for name, value in parsed.items() if value is not None}


def test_a_command_sets_the_values_that_the_real_program_prints() -> None:
    printed = dict(re.findall(r"(\w+) \.+ (.+)", PRINTED))
    found = release_table("0.15.0+flagscale").effective(TINY)
    assert {name: str(value) for name, value in found.items()} == printed


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("--bf16 --use-distributed-optimizer false", "--use-distributed-optimizer", "false"),
        ("--no-such-flag 3", "--no-such-flag", "3"),
        ("--bf16 --recompute-granularity none", "--recompute-granularity", "none"),
        ("--micro-batch-size two", "--micro-batch-size", "two"),
        ("--lr --bf16", "--lr", ""),
        ("--bf16=true", "--bf16", "true"),
        ("x", "", "x"),
    ],
)
def test_a_problem_names_its_flag_and_its_value(command: str, flag: str, value: str) -> None:
    (problem,) = release_table(None).parse(command.split())[1]
    assert (problem.flag, problem.value) == (flag, value)
    assert problem.problem
    assert problem.fix


@pytest.mark.parametrize(
    ("release", "flag", "fix"),
    [
        ("0.14", "--train_iters", "--train-iters"),
        ("0.14", "--micro-batch-sizes", "--micro-batch-size"),
        ("0.12", "--cuda-graph-impl", "0.15.0"),
    ],
)
def test_the_fix_of_an_unknown_flag_is_the_nearest_flag(release: str, flag: str, fix: str) -> None:
    (problem,) = release_table(release).parse([flag, "1"])[1]
    assert fix in problem.fix


def test_arguments_have_their_place_so_that_a_command_can_be_rewritten() -> None:
    words = ["--bf16", "--data-path", "0.5", "a", "--lr=1e-4", "--train-iters", "5"]
    found = release_table("0.16").parse(words)[0]
    assert [(each.flag, each.values, each.position, each.end) for each in found] == [
        ("--bf16", (), 0, 1),
        ("--data-path", ("0.5", "a"), 1, 4),
        ("--lr", ("1e-4",), 4, 5),
        ("--train-iters", ("5",), 5, 7),
    ]
    assert [each.value for each in found] == [True, ["0.5", "a"], 1e-4, 5]


@pytest.mark.parametrize(
    ("release", "table"),
    [
        ("0.12.2", "0.12.0"),
        ("0.9", "0.10.0"),
        ("0.16.1", "0.16.0"),
        ("1.0", known_releases()[-1]),
        (None, known_releases()[-1]),
        ("main", known_releases()[-1]),
        ("0.15.0rc5+flagscale", "0.15.0+flagscale"),
    ],
)
def test_a_release_has_the_nearest_table_at_or_below(release: str | None, table: str) -> None:
    assert release_table(release).release == table


def test_flags_come_and_go_with_releases() -> None:
    assert releases_with("--moe-flex-dispatcher-backend")[0] == "0.16.0"
    assert "0.10.0" in releases_with("--use-mcore-models")
    assert releases_with("--recompute-granularity-per-stage-micro-batch") == ("0.15.0+flagscale",)
