"""The engine `command`: the section `train.program`, rules, predictions, launches and trials of a user's program."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flagcore_trainers import start
from flagcore_trainers.meaning import layout_of, numbers, training, weights_of_rank
from flagcore_trainers.program import KnobRow, StateSection, program_of
from flagcore_trainers.trainer import COMMAND, Trainer

from flagcore import api
from flagcore.contracts import Platform
from flagcore.domain.chip import Fact
from flagcore.domain.launch import Launch
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from tests.checks import given, refuses
from tests.product.tasks import CHIP, SHAPE, SOURCE, costs
from tests.product.tasks import task as small_task

pytestmark = pytest.mark.spread

TP = {"flag": "--tp", "values": [1, 2, 4], "meaning": "tensor_model_parallel_size"}
MICRO = {"flag": "--micro", "values": [1, 2, 4], "meaning": "micro_batch_size"}
ZERO = {"flag": "shard={}", "values": {"none": 0, "optimizer": 1, "grads": 2, "full": 3}, "meaning": "zero_stage"}
KNOBS: dict[str, Any] = {"tp": TP, "micro": MICRO, "shard": ZERO, "workers": {"key": "data.workers", "values": [0, 2]}}
PROGRAM: dict[str, Any] = {"knobs": KNOBS, "config": "conf.yaml"}


def engine_of(program: Mapping[str, Any] = PROGRAM) -> Trainer:
    engine = COMMAND.with_program(program)
    assert isinstance(engine, Trainer)
    return engine


def task_of(command: tuple[str, ...] = (), folder: Path = Path(), **train: Any) -> Task:
    return small_task(engine="command", command=command, directory=str(folder), **train)


def launch(engine: Trainer, task: Task, folder: Path, *, for_real: bool = False, **values: Any) -> Launch:
    folder.mkdir(exist_ok=True)
    neutral = {knob.name: knob.neutral for knob in engine.knobs}
    platform = Platform(task=task, engine=engine, costs=costs(task))
    return engine.launch(platform, Candidate.of({**neutral, **values}), str(folder), for_real=for_real)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"knobs": {}}, "train.program.knobs"),
        ({"knobs": {"tp": {"flag": "--tp"}}}, "train.program.knobs.tp.values"),
        ({"knobs": {"tp": {**TP, "meaning": "tensor_parallel"}}}, "train.program.knobs.tp.meaning"),
        ({"knobs": {"tp": {**TP, "values": [0, 1]}}}, "train.program.knobs.tp.values"),
        ({"knobs": {"tp": {**TP, "values": ["a"]}}}, "train.program.knobs.tp.values"),
        ({"knobs": {"zero_stage": {"flag": "--z", "values": [0, 4]}}}, "train.program.knobs.zero_stage.values"),
        ({"knobs": {"tp": TP, "t": TP}}, "train.program.knobs"),
        ({"knobs": {"tp": TP}, "fixed": {"tensor_model_parallel_size": 2}}, "train.program.knobs"),
        ({"fixed": {"recompute": 3}}, "train.program.fixed.recompute"),
        ({"knobs": {"tp": {**TP, "default": 3}}}, "train.program.knobs.tp.default"),
        ({"config": None}, "train.program.knobs.workers.key"),
        ({"log": {"step": "step ("}}, "train.program.log.step"),
        ({"log": {"step": "took (.*) s"}}, "train.program.log.step"),
        ({"log": {"step": r"(?P<step>\d+) (?P<sec>\S+)"}}, "train.program.log.step"),
        ({"log": {"step": r"(?P<step>\d+) (?P<ms>(?P<s>\S+)) ms"}}, "train.program.log.step"),
        ({"logs": {}}, "train.program.logs"),
    ],
)
def test_invalid_programs_are_reported_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as refused:
        program_of({**PROGRAM, **changes})
    assert {each.key for each in refused.value.problems} == {key}


def test_a_spec_may_name_the_knobs_of_its_program() -> None:
    train = {"engine": "command", "seq_length": 64, "global_batch_size": 8, "precision": "fp32", "command": ["x"]}
    spec = {"model": SHAPE, "cluster": {"chip": "H100", "devices_per_node": 4}, "train": train}
    for program, space, keys in (
        ({"knobs": {"tp": TP, "micro": MICRO}}, {"tp": [1, 2]}, []),
        ({"knobs": {"tp": TP}}, {"micro": [1]}, ["auto_tuner.space.micro"]),
        ({"knobs": {"tp": TP}}, {"tp": ["a"]}, ["auto_tuner.space.tp[0]"]),
        ({"knobs": {"tp": 1}}, {}, ["train.program.knobs.tp"]),
        (None, {}, ["train.program"]),
    ):
        data = {**spec, "train": {**train, "program": program}, "auto_tuner": {"space": space}}
        found = []
        try:
            assert len(api.estimate(data).candidates) == 5
        except SpecError as error:
            found = [each.key for each in error.problems]
        assert found == keys, program
    with refuses("train.engine"):
        api.estimate({**spec, "train": {**train, "engine": "megatron", "program": {"knobs": {"tp": TP}}}})


def test_what_does_not_reach_the_program_is_a_warning() -> None:
    engine = engine_of({"knobs": {"tp": TP, "depth": {"values": [1, 2]}, "width": {"values": [1, 2]}}})
    words = ("train", "width={width}", "{grad_acc}", "{nnodes}", "{interface}", "{hostfile}")
    lines = engine.spec_warnings(task_of(words, engine_version="9.9").spec)
    assert "{grad_acc}" in lines[0]
    assert [each.split()[0] for each in lines] == ["train.command", "train.program.knobs.depth", "train.engine_version"]


def test_rules_use_what_knobs_mean() -> None:
    engine, task = engine_of({"knobs": {**KNOBS, "workers": {"flag": "--w", "values": [0]}}}), task_of(devices=4)
    columns = {"tp": np.array([1, 2, 3, 4]), "micro": np.array([2, 2, 1, 3])}
    broken = {rule.name: rule.broken(columns).tolist() for rule in engine.rules(task)}
    assert broken["world_size"] == [False, False, True, False]
    assert broken["global_batch_size"] == [False, False, False, True]
    assert broken["attention_heads"] == [False, False, True, False]


@pytest.mark.parametrize(("precision", "weights", "gradients", "states"), [("fp32", 4, 4, 8), ("bf16", 2, 4, 12)])
def test_each_zero_stage_shares_more_of_the_states(precision: str, weights: int, gradients: int, states: int) -> None:
    """Bytes per parameter of ZeRO (arXiv 1910.02054, section 3 and 5)."""
    task = task_of(devices=4, precision=precision)
    predictions = engine_of({"knobs": {"shard": ZERO}}).predict(task, {"shard": np.arange(1, 5)}, costs(task))
    whole = layout_of(numbers({}, {}, {"shard": np.ones(1, dtype=np.int64)}, 1, 1))
    params = weights_of_rank(training(task, 0, 0, StateSection()), whole)
    saved = -np.diff(predictions.static_bytes) / (0.75 * params)
    assert saved == pytest.approx([states, gradients, weights], rel=0.01)


def test_zero_exchanges_more_data_with_more_micro_batches() -> None:
    """ZeRO-2 scatters gradients, and ZeRO-3 also gathers weights, for each micro-batch."""
    slow = replace(given(CHIP.link), bytes_per_second=Fact(value=1e9, source=SOURCE))
    task = task_of(devices=4, global_batch_size=512, chip=replace(CHIP, link=slow))
    seconds = engine_of({"knobs": {"shard": ZERO}}).predict(task, {"shard": np.arange(1, 5)}, costs(task)).step_time_s
    assert seconds[1] < seconds[2] < seconds[3]


def test_recompute_and_micro_batch_change_activations() -> None:
    knobs = {"micro": MICRO, "recompute": {"flag": "--ac", "values": [False, True]}}
    task = task_of(devices=1)
    columns = {"micro": np.array([1, 4, 4]), "recompute": np.array([0, 0, 1])}
    activations = engine_of({"knobs": knobs}).predict(task, columns, costs(task)).activation_bytes
    assert activations[0] < activations[2] < activations[1]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_candidate_is_a_changed_command_and_a_copy_of_the_configuration(tmp_path: Path, suffix: str) -> None:
    config = tmp_path / f"conf.{suffix}"
    content = {"data": {"path": "x", "workers": 4}, "save": True}
    text = json.dumps(content) if suffix == "json" else yaml.safe_dump(content)
    config.write_text(text)
    words = ("torchrun", "train.py", "--config=" + config.name, "--tp", "4", "--tp=2", "shard=none", "--dp")
    command = (*words, "{data_parallel_size}")
    trial = {"trial_args": ["--steps", "{steps}"], "trial_keys": {"save": False, "log.every": 1}}
    engine = engine_of({**PROGRAM, "config": config.name, **trial})
    task = task_of(command, tmp_path, devices=4)
    found = launch(engine, task, tmp_path / "trial", tp=2, micro=4, shard="full", workers=2)
    written = f"{tmp_path}/trial/candidate.{suffix}"
    expected = f"torchrun train.py --config={written} --dp 2 --tp 2 --micro 4 shard=full --steps 5"
    assert " ".join(found.argv) == expected
    assert found.environment["FLAGCORE_TP"] == "2"
    assert yaml.safe_load(Path(written).read_text()) == {
        "data": {"path": "x", "workers": 2},
        "save": False,
        "log": {"every": 1},
    }
    assert "--steps" not in launch(engine, task, tmp_path / "real", for_real=True, workers=2).argv
    assert yaml.safe_load((tmp_path / f"real/candidate.{suffix}").read_text())["save"] is True
    assert config.read_text() == text
    assert engine.usual_space(task) == {"tp": (2,), "micro": (1,), "shard": ("none",), "workers": (4,)}


VARIABLE = "ACME_ALGO"


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "A B", "A-B", "1A", "A=B", "A\0", "A\n", "$A", "ä", "A" * 201, 1, True, ["A"]),
        *("FLAGCORE_X", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "ACME_VISIBLE_DEVICES"),
    ],
)
def test_what_cannot_be_a_variable_of_a_knob_is_refused(name: object) -> None:
    with refuses("train.program.knobs.algo.env"):
        program_of({"knobs": {"algo": {"env": name, "values": ["ring"]}}})


@pytest.mark.parametrize("values", [[""], ["\0"], [None], [["ring"]], "ring", [], [float("nan")], ["x" * 201]])
def test_values_that_no_variable_can_have_are_refused(values: object) -> None:
    with pytest.raises(SpecError):
        program_of({"knobs": {"algo": {"env": VARIABLE, "values": values}}})


@pytest.mark.parametrize(
    ("value", "text"),
    [("unset", None), ("ring", "ring"), (True, "1"), (False, "0"), (-1, "-1"), (0.5, "0.5"), (" a\n$(b) 'c' é", None)],
)
def test_a_knob_may_be_an_environment_variable(tmp_path: Path, value: Any, text: str | None) -> None:
    engine = engine_of({"knobs": {"algo": {"env": VARIABLE, "values": [value]}}})
    task = task_of(("train",), tmp_path)
    found = launch(engine, task, tmp_path / "trial")
    assert found.argv == ("train",)
    assert found.environment.get(VARIABLE) == (text if value == "unset" else text or value)
    platform = Platform(task=task, engine=engine, costs=costs(task), environment={VARIABLE: "of the plugin"})
    argv = engine.launch(platform, Candidate.of({"algo": engine.knobs[0].neutral}), str(tmp_path)).argv
    assert argv == (("train",) if value == "unset" else ("env", f"{VARIABLE}={text or value}", "train"))


@pytest.mark.parametrize("where", ["envs", "command", "shell", "another knob"])
def test_the_users_own_variable_is_not_replaced(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, Any] = {"algo": {"env": VARIABLE, "values": ["ring"]}}
    with refuses("train.program.knobs" + (".algo.env" if where != "another knob" else "")):
        engine = engine_of({"knobs": {**rows, **({"b": rows["algo"]} if where == "another knob" else {})}})
        task = task_of(("env", f"{VARIABLE}=tree", "train") if where == "command" else ("train",))
        spec = replace(task.spec, envs={VARIABLE: "tree"} if where == "envs" else {})
        if where == "shell":
            monkeypatch.setenv(VARIABLE, "tree")
        engine.ready(spec)


@pytest.mark.parametrize(
    ("name", "text", "command", "key"),
    [
        ("conf.yaml", None, ["x", "conf.yaml"], "train.program.config"),
        ("conf.yaml", "- a", ["x", "conf.yaml"], "train.program.config"),
        ("conf.toml", "a = 1", ["x", "conf.toml"], "train.program.config"),
        ("conf.yaml", "a: 1", ["x"], "train.program.config"),
        ("conf.yaml", "a: 1", None, "train.command"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_reported(
    tmp_path: Path, name: str, text: str | None, command: list[str] | None, key: str
) -> None:
    if text:
        (tmp_path / name).write_text(text)
    task = small_task(engine="command", command=command and tuple(command), directory=str(tmp_path))
    with refuses(key):
        engine_of({**PROGRAM, "config": name}).ready(task.spec)


def test_lines_without_a_number_must_come_at_each_step() -> None:
    engine = engine_of({"knobs": {"tp": TP}, "log": {"format": "huggingface"}})
    engine.ready(task_of(("x", "--logging_steps", "1")).spec)
    with refuses("train.program.log.format"):
        engine.ready(task_of(("x", "--logging_steps", "10")).spec)
    found = launch(engine, task_of(("x", "--logging_steps", "1")), Path())
    assert found.argv[1:3] == ("-m", "flagcore_trainers.clock")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--sp", True, ["x", "--sp"]),
        ("--sp", False, ["x"]),
        ("model.sp={}", True, ["x", "model.sp=true"]),
        ("-t", 2, ["x", "-t", "2"]),
    ],
)
def test_flags_replace_those_of_the_user(flag: str, value: Any, words: list[str]) -> None:
    given = ("x", *(["--sp"] if isinstance(value, bool) else ["-t", "1"]), "model.sp=false")
    given = tuple(word for word in given if "{}" in flag or not word.startswith("model."))
    given = given if "{}" not in flag else ("x", "model.sp=false")
    command = start.Command(words=given, directory=".")
    assert list(start.argv_of(command, {"k": KnobRow(values=[0], flag=flag)}, {"k": value}, {}, (), "")) == words


FAKE = """
import argparse, sys, time
parser = argparse.ArgumentParser()
for flag in ("--micro", "--tp", "--steps"):
    parser.add_argument(flag, type=int, default=1)
given = parser.parse_args()
if given.micro == 4:
    raise RuntimeError("torch.OutOfMemoryError: out of memory")
shown = 1 if given.tp == 2 else given.tp
print(f"tensor parallel size: {shown}", flush=True)
for step in range(1, 1000):
    time.sleep(0.4 / given.micro)
    print(f"step {step} loss {9.0 / step}", end="\\r", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_prints_no_times_is_tuned(tmp_path: Path) -> None:
    """Trials are timed by the arrival of lines, stopped after their steps, and checked against what is printed."""
    (tmp_path / "train.py").write_text(FAKE)
    knobs = {
        "tp": {**TP, "values": [1, 2], "printed": r"tensor parallel size: (\d+)"},
        "micro": {**MICRO, "values": [1, 2, 4]},
    }
    spec = {
        "model": SHAPE,
        "cluster": {"chip": "cpu", "devices_per_node": 2},
        "train": {
            "engine": "command",
            "seq_length": 32,
            "global_batch_size": 8,
            "precision": "fp32",
            "command": [sys.executable, str(tmp_path / "train.py")],
            "program": {"knobs": knobs, "log": {"step": r"step (?P<step>\d+) loss (?P<loss>\S+)"}},
        },
        "auto_tuner": {"control": {"train_iters": 4, "max_trials": 6, "repeats": 0, "indifference": 0.0}},
    }
    outcome = api.tune(spec, run_dir=tmp_path / "run")
    states = {
        (values["tp"], values["micro"]): trial.state.value
        for trial in outcome.plan.trials
        if (values := trial.candidate.as_dict())
    }
    assert states[1, 1] == "measured"
    assert {state for (tp, micro), state in states.items() if micro == 4} == {"out_of_memory"}
    wrong = {state for (tp, micro), state in states.items() if tp == 2 and micro < 4}
    assert "invalid" in wrong
    assert wrong <= {"invalid", "stopped"}  # a slower one may be stopped before it is checked
    assert given(outcome.plan.best).candidate.as_dict() == {"tp": 1, "micro": 2}


TORCH_PROGRAM = Path(__file__).parent / "program" / "train.py"


@pytest.mark.long
def test_a_torch_program_is_tuned_without_side_effects(tmp_path: Path) -> None:
    knobs = {
        "tp": {"flag": "--tp", "values": [1, 2], "meaning": "tensor_model_parallel_size"},
        "micro": {"flag": "--micro-batch", "values": [1, 4], "meaning": "micro_batch_size"},
        "shard": {"flag": "--shard", "values": {"none": 0, "full": 3}, "meaning": "zero_stage"},
    }
    knobs["tp"]["printed"] = r"tensor parallel (\d+)"
    step = r"step (?P<step>\d+)/\d+ loss (?P<loss>\S+) took (?P<ms>[\d.]+) ms"
    spec = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 512,
        },
        "cluster": {"chip": "cpu", "devices_per_node": 2},
        "train": {
            "engine": "command",
            "seq_length": 32,
            "global_batch_size": 8,
            "precision": "fp32",
            "command": [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                str(TORCH_PROGRAM),
            ],
            "directory": str(tmp_path),
            "program": {"knobs": knobs, "log": {"step": step}},
        },
        "auto_tuner": {"control": {"train_iters": 5, "warmup_iters": 2, "max_trials": 4, "repeats": 0}},
        "envs": {"OMP_NUM_THREADS": 1},
    }
    outcome = api.tune(spec, run_dir=tmp_path / "run")
    trials = [trial for trial in outcome.plan.trials if trial.measurement is not None]
    assert len(trials) >= 3
    assert {trial.state.value for trial in outcome.plan.trials} <= {"measured", "stopped"}
    losses = [trial.measurement.losses[0] for trial in trials if trial.measurement is not None]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.02)  # all candidates train the same model
    assert all(trial.measurement.effective == {"tp": trial.candidate.as_dict()["tp"]} for trial in trials)
    assert not list(tmp_path.glob("checkpoint*"))
