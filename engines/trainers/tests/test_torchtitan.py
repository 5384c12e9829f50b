"""The engine `torchtitan`: the commands of candidates, their predictions, and torchtitan's own parser."""

import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_trainers.fsdp2.engine import FSDP2
from flagcore_trainers.fully_shard import AC, CP, MBS, RESHARD, SHARD, TP
from flagcore_trainers.torchtitan import TORCHTITAN, TorchTitan, lacks_graphs

from flagcore.contracts import Platform
from flagcore.domain.space import Candidate
from tests.checks import refuses
from tests.product.tasks import EXPERTS, costs, task

pytestmark = pytest.mark.spread

COMMAND = ("torchrun", "-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_8b")
NEUTRAL = {knob.name: knob.neutral for knob in TORCHTITAN.knobs}


def argv(folder: Path, *own: str, for_real: bool = False, **values: Any) -> tuple[str, ...]:
    job = task(engine="torchtitan", command=(*COMMAND, *own))
    platform = Platform(task=job, engine=TORCHTITAN, costs=costs(job))
    return TORCHTITAN.launch(platform, Candidate.of({**NEUTRAL, **values}), str(folder), for_real=for_real).argv


def test_options_of_a_candidate_replace_the_users(tmp_path: Path) -> None:
    own = ("--training.local_batch_size", "2", "activation-checkpoint:none")
    words = argv(tmp_path, *own, **{MBS: 4, AC: "full", TP: 2, "compile": True})
    assert words[: len(COMMAND)] == COMMAND
    assert words[-1] == "activation-checkpoint:full"
    assert [words[place + 1] for place, word in enumerate(words) if word == "--training.local_batch_size"] == ["4"]
    assert {"--compile.enable", "--checkpoint.no-enable", "--training.steps"} <= {*words}
    assert "--compile.no-enable" in argv(tmp_path)
    assert "--compile.no-enable" not in words
    assert not {"--checkpoint.no-enable", "--training.steps"} & {*argv(tmp_path, *own, for_real=True)}
    assert words[words.index("--training.global_batch_size") + 1] == "8"


@pytest.mark.parametrize(
    ("text", "key"), [(None, "--job.config_file"), ("[model", "--job.config_file"), ("[model]", "train.program")]
)
def test_a_toml_file_is_read_and_needs_the_options_of_its_releases(tmp_path: Path, text: str | None, key: str) -> None:
    if text:
        (tmp_path / "x.toml").write_text(text)
    job = task(engine="torchtitan", command=(*COMMAND, "--job.config_file", "x.toml"), directory=str(tmp_path))
    with refuses(key):
        TORCHTITAN.usual_space(job)


def test_a_knob_of_the_user_keeps_its_option() -> None:
    narrow = TORCHTITAN.with_program(
        {"knobs": {"compile": {"values": [True]}, "other": {"flag": "--x", "values": [1, 2]}}}
    )
    assert isinstance(narrow, TorchTitan)
    assert (narrow.described.knobs["compile"].flag, narrow.described.knobs["other"].flag) == ("--compile.enable", "--x")


def test_predictions_are_those_of_fsdp2() -> None:
    job = task(engine="torchtitan", command=COMMAND)
    given = {**NEUTRAL, TP: 2, CP: 1, MBS: 2, AC: "selective", RESHARD: "never"}
    row = {knob.name: np.array([knob.axis(()).encode(given[knob.name])]) for knob in TORCHTITAN.knobs}
    values = {knob.name: knob.neutral for knob in FSDP2.knobs}
    values |= {SHARD: 2, TP: 2, MBS: 2, AC: "selective", RESHARD: False}
    other = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in FSDP2.knobs}
    found, expected = TORCHTITAN.predict(job, row, costs(job)), FSDP2.predict(job, other, costs(job))
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=0.05)
    assert found.peak_allocated_bytes < expected.peak_allocated_bytes
    old = TORCHTITAN.predict(task(engine="torchtitan", command=COMMAND, engine_version="0.2.2"), row, costs(job))
    assert old.peak_allocated_bytes == expected.peak_allocated_bytes
    row, other = ({**each, "compile": np.array([1])} for each in (row, other))  # torchtitan compiles the loss, too
    found, expected = TORCHTITAN.predict(job, row, costs(job)), FSDP2.predict(job, other, costs(job))
    assert found.step_time_s < expected.step_time_s
    assert found.peak_allocated_bytes <= expected.peak_allocated_bytes


def test_a_mixture_of_experts_has_the_loss_in_parts() -> None:
    def peak(release: str, *own: str) -> float:
        job = task(EXPERTS, engine="torchtitan", command=(*COMMAND, *own), engine_version=release)
        row = {knob.name: np.array([knob.axis(()).encode({**NEUTRAL, MBS: 4}[knob.name])]) for knob in TORCHTITAN.knobs}
        return float(TORCHTITAN.predict(job, row, costs(job)).peak_allocated_bytes[0])

    whole, eighth = peak("0.2.2"), peak("0.3.0")
    assert eighth < peak("0.3.0", "--loss.num_chunks", "4") < whole


STAGES = "--parallelism.pipeline_parallel_degree"


def test_a_local_batch_is_a_pass_through_the_pipeline(tmp_path: Path) -> None:
    engine = TORCHTITAN.with_program({"fixed": {"zero_stage": 3, "pipeline_model_parallel_size": 2}})
    job, pairs = (
        task(engine="torchtitan", command=(*COMMAND, STAGES, "2", *own))
        for own in ((), ("--parallelism.pipeline_parallel_microbatch_size", "2"))
    )
    row = {knob.name: np.array([knob.axis(()).encode(knob.neutral)] * 2) for knob in engine.knobs}
    row[MBS] = np.array([1, 4])
    found, of_pairs = (engine.predict(each, row, costs(each)) for each in (job, pairs))
    assert found.time_s["pp_bubble_s"][0] > 3 * found.time_s["pp_bubble_s"][1]
    assert found.step_time_s[0] > found.step_time_s[1]
    assert found.time_s["optimizer_s"][0] == found.time_s["optimizer_s"][1]
    assert of_pairs.activation_bytes[1] > found.activation_bytes[1]
    assert [rule.broken(row).tolist() for rule in engine.rules(pairs) if rule.name == "stage_micro_batch"] == [[1, 0]]
    launch = engine.launch(
        Platform(task=job, engine=engine, costs=costs(job)), Candidate.of(NEUTRAL), str(tmp_path), for_real=True
    )
    assert "--training.disable_cuda_graphs" in launch.argv
    assert any("disable_cuda_graphs" in each for each in engine.task_warnings(job))


@pytest.mark.parametrize(
    ("own", "is_added"),
    [
        ((), False),
        ((STAGES, "2"), True),
        ((STAGES, "2", "--training.disable_cuda_graphs"), False),
        (("--parallelism.expert_parallel_degree", "4"), True),
        (("--config", "deepseek_v3_16b_hybridep", "--parallelism.expert_parallel_degree", "4"), False),
    ],
)
def test_graphs_are_turned_off_where_torchtitan_refuses_them(own: tuple[str, ...], is_added: bool) -> None:
    assert lacks_graphs((*COMMAND[:-2], *own), {}) is is_added


def test_the_commands_checkpoints_are_the_baseline() -> None:
    job = task(engine="torchtitan", command=(*COMMAND, "activation-checkpoint:full"))
    assert TORCHTITAN.usual_space(job)[AC] == ("full",)


def test_replicas_share_their_weights_among_fewer_ranks() -> None:
    key = "--parallelism.data_parallel_replicate_degree"
    plain, halves, thirds = (task(engine="torchtitan", command=(*COMMAND, key, each)) for each in ("1", "2", "3"))
    row = {knob.name: np.array([knob.axis(()).encode(knob.neutral)]) for knob in TORCHTITAN.knobs}
    all_ranks, replicas = (TORCHTITAN.predict(job, row, costs(job)) for job in (plain, halves))
    assert replicas.static_bytes > 1.5 * all_ranks.static_bytes
    assert not TORCHTITAN.unmodelled(halves)
    broken = ([rule.name for rule in TORCHTITAN.rules(job) if rule.broken(row).any()] for job in (halves, thirds))
    assert [*broken] == [[], ["replicas"]]


def test_tokens_of_a_batch_are_written_by_the_names_of_their_release(tmp_path: Path) -> None:
    flag = "--training.num_tokens_per_microbatch_per_dp_rank"
    knobs = {MBS: {"flag": flag, "values": {"4096": 1, "8192": 2}}}
    engine, job = TORCHTITAN.with_program({"knobs": knobs}), task(engine="torchtitan", command=COMMAND)
    values = {knob.name: knob.neutral for knob in engine.knobs} | {MBS: "8192"}
    platform = Platform(task=job, engine=engine, costs=costs(job))
    words = engine.launch(platform, Candidate.of(values), str(tmp_path)).argv
    given = dict(pairwise(words))
    work = job.spec.train
    tokens = str(work.global_batch_size * work.seq_length)
    assert (given[flag], given["--training.num_tokens_per_train_step"]) == ("8192", tokens)
    assert not {"--training.local_batch_size", "--training.global_batch_size", "--training.seq_len"} & {*words}


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitan_parses_the_options(tmp_path: Path) -> None:
    words = argv(tmp_path, **{MBS: 4, AC: "full", CP: 2, RESHARD: "never", "compile": True})
    code = (
        "import sys; from torchtitan.config import ConfigManager as C; c = C().parse_args(sys.argv[1:]);"
        "print(c.training.local_batch_size, c.parallelism.context_parallel_degree, c.compile.enable,"
        "c.parallelism.fsdp_reshard_after_forward, type(c.activation_checkpoint).__qualname__, c.checkpoint.enable)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *words[3:]], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "4 2 True never FullAC.Config False"


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_the_trainer_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.trainers.tests import titan_on_cpu

    titan_on_cpu.write_assets(tmp_path)
    (tmp_path / "trial").mkdir()
    own = ("--module", "llama3", "--config", "llama3_debugmodel", "--parallelism.spmd_backend", "partial_dtensor")
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", titan_on_cpu.__file__, *own)
    job = task(engine="torchtitan", command=command, directory=str(tmp_path), devices=2, seq_length=64)
    platform = Platform(task=job, engine=TORCHTITAN, costs=costs(job))
    candidate = Candidate.of({**NEUTRAL, MBS: 2, AC: "full", RESHARD: "never"})
    launch = TORCHTITAN.launch(platform, candidate, str(tmp_path / "trial"))
    with (tmp_path / "trial" / "stdout.log").open("w") as log:
        subprocess.run(launch.argv, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, check=True)
    measured = TORCHTITAN.read(job, candidate, str(tmp_path / "trial"))
    assert measured.losses[-1] < measured.losses[0]
    assert measured.peak_allocated_bytes
    assert {each.name for each in tmp_path.iterdir()} == {"tests", "trial"}
