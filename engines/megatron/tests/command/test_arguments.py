"""The tables of Megatron-LM's arguments, and how a command is read with them: as argparse does."""

import argparse
import re
import shlex
from typing import Any

import pytest
from flagcore_megatron.program.arguments import ArgumentTable, known_releases, release_table, releases_with

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
