"""Which release of Megatron-LM a command runs, and flags against the argument table of every release. A job in the
manner of NVIDIA's example scripts, tuned without harm by the real `pretrain_gpt.py` on a CPU."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.program.arguments import known_releases, release_table
from flagcore_megatron.program.user_command import find_release
from flagcore_megatron.space.flags import flags
from flagcore_megatron.space.knobs import BY_NAME, KNOBS

from engines.megatron.tests.command.real import ARCHITECTURE, MEGATRON, needs_megatron_lm, spec_of
from engines.megatron.tests.trial.trial_jobs import NEEDS_MEGATRON
from flagcore import api
from flagcore.domain.knob import in_versions
from flagcore.domain.spec import SettingValue
from flagcore.errors import SpecErrors
from tests.checks import program
from tests.product import tasks

INFO = """\
MAJOR = {}
MINOR = {}
PATCH = {}
PRE_RELEASE = 'rc5'
"""


def tree(folder: Path, release: str, arguments: str = "") -> Path:
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(INFO.format(*release.split(".")))
    (folder / "megatron" / "training" / "arguments.py").write_text(arguments)
    (folder / "pretrain_gpt.py").touch()
    return folder


@pytest.mark.parametrize(
    ("program", "folder", "expected"),
    [
        ("own/pretrain_gpt.py", ".", "0.14.0"),
        ("pretrain_gpt.py", "own", "0.14.0"),
        ("fork/pretrain_gpt.py", ".", "0.15.0+flagscale"),
        ("unnamed/pretrain_gpt.py", ".", "0.12.3"),
    ],
)
def test_the_tree_of_the_program_counts_before_pythonpath(
    program: str, folder: str, expected: str, tmp_path: Path
) -> None:
    tree(tmp_path / "own", "0.14.0")
    tree(tmp_path / "fork", "0.15.0", "# FlagScale Begin")
    (tree(tmp_path / "unnamed", "0.13.0") / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")
    other = tree(tmp_path / "other", "0.12.3")
    assert find_release(str(tmp_path / folder), program, None, str(other)) == expected


def test_a_program_elsewhere_has_the_release_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "other", "0.12.3")
    assert find_release(str(tmp_path), "train.py", None, "nothing:other") == "0.12.3"
    assert find_release(str(tree(tmp_path / "own", "0.14.0")), "examples/mimo/train.py", None, "") == "0.14.0"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    assert find_release(str(tmp_path), None, None) == "0.12.3"


@pytest.mark.slow
@NEEDS_MEGATRON
def test_without_a_tree_the_installed_package_counts(tmp_path: Path) -> None:
    assert find_release(str(tmp_path), "train.py", None, "") == version("megatron-core")


def test_another_interpreter_is_queried_and_an_unusable_one_gives_no_release(tmp_path: Path) -> None:
    python = program(tmp_path / "python", f'exec {sys.executable} "$@"')
    package = tmp_path / "packages" / "megatron_core-0.13.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.13.1\n")
    assert find_release(str(tmp_path), "train.py", str(python), str(package.parent)) == "0.13.1"
    assert find_release(str(tmp_path), "train.py", str(tmp_path / "missing"), "") is None


RELEASES = (*known_releases(), "0.15.0+flagscale")


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_the_flags_that_its_parser_has(release: str) -> None:
    flags = [(flag, name) for knob in KNOBS for flag in knob.flags for name in (flag.name, flag.off) if name]
    flags = [each for each in flags if each[1] != "context-parallel-algo"]  # MindSpeed-LLM's
    in_parser = [name for _, name in flags if f"--{name}" in release_table(release).by_flag]
    assert [name for flag, name in flags if in_versions(flag.versions, release)] == in_parser


@pytest.mark.parametrize("release", RELEASES)
def test_a_switch_sets_the_value_in_its_name(release: str) -> None:
    for knob, value in product((knob for knob in KNOBS if knob.kind == "flag"), (True, False)):
        found = release_table(release).effective(knob.arguments(value, release))
        assert set(found) <= {knob.name, "use_custom_fsdp", "grad_reduce_in_bf16", "overlap_p2p_comm"}
        assert found.get(knob.name, value) is value


@pytest.mark.parametrize(
    ("name", "value", "release", "arguments"),
    [
        ("moe_flex_dispatcher_backend", "deepep", "0.16.0", ("--moe-flex-dispatcher-backend", "deepep")),
        ("moe_flex_dispatcher_backend", "deepep", "0.14.0", ("--moe-enable-deepep",)),
        ("moe_flex_dispatcher_backend", "hybridep", "0.14.0", ()),
        ("cuda_graph_impl", "local", "0.16.0", ("--cuda-graph-impl", "local")),
        ("cuda_graph_impl", "local", "0.12.0", ("--enable-cuda-graph",)),
        ("cuda_graph_impl", "transformer_engine", "0.15.0+flagscale", ("--external-cuda-graph",)),
        ("cuda_graph_scope", "attn", "0.18.0", ("--cuda-graph-modules", "attn")),
        ("use_megatron_fsdp", True, "0.13.0", ("--use-custom-fsdp",)),
        ("overlap_p2p_comm", True, None, ()),
        ("overlap_p2p_comm", False, None, ("--no-overlap-p2p-communication",)),
        ("accumulate_allreduce_grads_in_fp32", False, "0.12.0", ("--grad-reduce-in-bf16",)),
    ],
)
def test_a_value_has_the_spelling_of_its_release(
    name: str, value: str | bool, release: str | None, arguments: tuple[str, ...]
) -> None:
    assert BY_NAME[name].arguments(value, release) == arguments


def problems(release: str | None, settings: dict[str, SettingValue], **sections: Any) -> list[tuple[str, object]]:
    try:
        ENGINE.check_values(replace(tasks.task(engine_version=release, settings=settings).spec, **sections))
    except SpecErrors as errors:
        return [(each.key, each.value) for each in errors.problems]
    return []


def test_a_setting_that_the_release_lacks_is_an_error() -> None:
    expected: dict[str, SettingValue] = {
        "overlap_grad_reduce": True,
        "pipeline_model_parallel_layout": "Et|tL",
        "exp_avg_dtype": "bf16",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_expert_imbalance": 1.5,
    }
    incomplete = ["pipeline_model_parallel_layout", "exp_avg_dtype", "moe_flex_dispatcher_backend"]
    assert problems("0.12.1", expected) == [(f"train.settings.{name}", expected[name]) for name in incomplete]
    assert problems("0.16.1", expected) == []
    assert problems(None, expected) == []


def test_the_fix_names_available_releases_or_values() -> None:
    for name, value, fix in (("cuda_graph_scope", "attn,mlp", "full"), ("delay_wgrad_compute", True, "0.13.0")):
        spec = tasks.task(engine_version="0.12.0", settings={name: value}).spec
        with pytest.raises(SpecErrors) as caught:
            ENGINE.check_values(spec)
        assert fix in caught.value.fix


def test_values_of_space_and_baseline_are_checked_too() -> None:
    baseline, space = {"use_megatron_fsdp": True}, {"delay_wgrad_compute": (False, True), "micro_batch_size": "auto"}
    found = problems("0.11.0", {}, baseline=baseline, space=space)
    assert found == [("auto_tuner.baseline.use_megatron_fsdp", True), ("auto_tuner.space.delay_wgrad_compute", True)]


def test_flags_that_a_setting_needs_are_passed_with_it() -> None:
    settings: dict[str, SettingValue] = {"moe_token_dispatcher_type": "flex", "use_megatron_fsdp": True}
    spec = tasks.task(engine_version="0.14.0", settings=settings).spec
    words = flags({}, spec, None)
    assert release_table("0.14.0").parse(words)[1] == []
    found = release_table("0.14.0").effective(words)
    assert (found["moe_enable_deepep"], found["data_parallel_sharding_strategy"]) == (True, "optim_grads_params")
    assert found["ckpt_format"] == "fsdp_dtensor"  # asserted since 0.14; earlier releases do not have it
    older = flags({}, replace(spec, work=replace(spec.train, engine_version="0.13.0")), None)
    assert "--ckpt-format" not in older
    own = replace(spec.train, command=("pretrain_gpt.py", "--moe-enable-deepep"))
    assert "--moe-enable-deepep" not in flags({}, replace(spec, work=own), None)


SCRIPT = f"""\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-1}}
CHECKPOINTS=${{1:-"checkpoints/tiny"}}
TENSORBOARD=${{2:-"tensorboard/tiny"}}
mkdir -p "$(dirname "$CHECKPOINTS")" "$(dirname "$TENSORBOARD")"
GPUS_PER_NODE=2
NUM_NODES=1
PROGRAM="$MEGATRON/pretrain_gpt.py"
CACHE="${{PWD}}/cache"
mkdir -p "$CACHE"
DISTRIBUTED=(
  --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank ${{NODE_RANK:-0}}
  --master_addr ${{MASTER_ADDR:-localhost}} --master_port ${{MASTER_PORT:-29500}}
)
MODEL=(
{ARCHITECTURE}
)
TRAINING=(
  --train-samples 1953125 --lr-decay-samples 1949218 --lr-warmup-samples 2000 --clip-grad 1.0 --weight-decay 0.1
  --bf16 --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
PARALLEL=(--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel)
DATA=("--data-cache-path ${{CACHE}}" "--split '99,1,0'" "--no-mmap-bin-files")
LOGGING=(
  --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
  --ckpt-format torch --distributed-timeout-minutes 60
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --tensorboard-dir "$TENSORBOARD"
)
if [ ! -f "$PROGRAM" ]; then
  echo "Error: no program at $PROGRAM"
  exit 1
fi
torchrun ${{DISTRIBUTED[@]}} \\
  "$PROGRAM" \\
  ${{MODEL[@]}} \\
  ${{TRAINING[@]}} ${{PARALLEL[@]}} ${{DATA[@]}} ${{LOGGING[@]}} 2>&1 | tee "$CACHE/train.log"
"""
CONTROL = {"train_iters": 4, "max_trials": 8, "max_time_per_task": 120}
SPACE = {
    "micro_batch_size": [1, 2, 4],
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": [1, 2],
    "pipeline_model_parallel_size": [1, 2],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "run.sh").chmod(0o444)
    folder.chmod(0o555)
    return folder


@pytest.fixture(scope="module")
def tuned(job: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[api.Outcome, dict[str, str], dict[str, str]]:
    """The outcome, and the content of the user's folders before and after."""
    where = tmp_path_factory.mktemp("tune")
    (where / "spec.yaml").write_text(yaml.safe_dump(spec_of(job, control=CONTROL, space=SPACE)))
    before = {**content(job), **content(MEGATRON)}
    return api.tune(where / "spec.yaml", run_dir=where / "run"), before, {**content(job), **content(MEGATRON)}


def content(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {str(file): hashlib.sha1(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_megatron_lm
def test_eight_candidates_are_measured_and_the_counts_add_up(tuned: tuple[api.Outcome, Any, Any]) -> None:
    outcome = tuned[0]
    states = [(trial["state"], trial["reason"]) for trial in outcome.data["trials"]]
    assert all(state in ("measured", "stopped") for state, _ in states), states
    assert len(states) == 8
    assert outcome.plan.counts.balanced
    for trial in outcome.data["trials"]:
        if trial["state"] == "measured":
            assert len(trial["measured"]["losses"]) == 4
            effective = trial["measured"]["effective"]
            assert effective["tensor_model_parallel_size"] == trial["candidate"]["tensor_model_parallel_size"]
            assert effective["micro_batch_size"] == trial["candidate"]["micro_batch_size"]


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_megatron_lm
def test_nothing_is_written_outside_the_runs_folder(
    tuned: tuple[Any, dict[str, str], dict[str, str]], job: Path
) -> None:
    assert tuned[1] == tuned[2]
    assert [file.name for file in job.iterdir()] == ["run.sh"]


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_megatron_lm
def test_best_trains_with_all_arguments_of_the_user(tuned: tuple[api.Outcome, Any, Any], job: Path) -> None:
    script = tuned[0].run_dir / "best.sh"
    text = script.read_text()
    assert "best bash run.sh" in text
    assert "--train-iters" not in text
    job.chmod(0o755)
    process = subprocess.Popen(
        [script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        deadline, seen = time.monotonic() + 120, ""
        while "iteration       10/" not in seen and time.monotonic() < deadline:
            line = process.stdout.readline()
            assert line, seen[-2000:]
            seen += line
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun, too, which ends its ranks: each has a session of its own
        process.communicate()
    assert "244140" in seen
    assert (job / "cache" / "train.log").exists()


ONE = {
    "micro_batch_size": 1,
    "use_distributed_optimizer": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
}
"""A space of one candidate."""
TRAIN = "--train-iters 1000 --bf16"


def tune(folder: Path, arguments: str, options: str, precision: str) -> Any:
    """Tune the space of one candidate, and return its only trial."""
    (folder / "job").mkdir()
    program = "$MEGATRON/pretrain_gpt.py"
    text = f"ARGS=({ARCHITECTURE} {arguments})\ntorchrun --nproc_per_node 2 {options} {program} ${{ARGS[@]}}\n"
    (folder / "job" / "run.sh").write_text(text)
    control = {"train_iters": 4, "max_trials": 1, "max_time_per_task": 100}
    data = spec_of(folder / "job", control=control, space=ONE, precision=precision)
    (folder / "spec.yaml").write_text(yaml.safe_dump(data))
    (trial,) = api.tune(folder / "spec.yaml", run_dir=folder / "run").plan.trials
    return trial


MEASURED = {
    "samples": ("--train-samples 90000 --lr-decay-samples 80000 --lr-warmup-samples 20000 --bf16", ""),
    "ramp-up": ("--train-samples 90000 --rampup-batch-size 2 2 1000 --bf16", ""),
    "evaluation longer than training": (f"{TRAIN} --eval-iters 5000 --eval-interval 2", ""),
    "a full disk": (f"{TRAIN} --save /dev/full/checkpoints --save-interval 1 --tensorboard-dir /dev/full/logs", ""),
    "logs of ranks": (TRAIN, "--log-dir logs --redirects 3"),
    "prefixes": (TRAIN, "--log-dir logs --tee 3"),
    "warm-up": (f"{TRAIN} --lr-warmup-iters 2000 --lr-decay-iters 9000", ""),
    "wsd": (f"{TRAIN} --lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-wsd-decay-style linear", ""),
    "fp16": ("--train-iters 1000 --fp16", ""),
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_megatron_lm
@pytest.mark.parametrize("name", MEASURED)
def test_unusual_job_is_measured(name: str, tmp_path: Path) -> None:
    arguments, options = MEASURED[name]
    trial = tune(tmp_path, arguments, options, "fp16" if name == "fp16" else "bf16")
    assert (trial.state.value, trial.reason) == ("measured", None)
    assert len(trial.measurement.step_times_s) == 3
    assert {file.name for file in (tmp_path / "job").iterdir()} == {"run.sh"}
