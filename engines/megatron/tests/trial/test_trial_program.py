"""The trial program as its caller sees it: files, exit codes, stderr, and no process left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.trial.job import parse_job
from flagcore_training.trial import forked_ranks as ranks
from flagcore_training.trial import program as failures
from flagcore_training.trial.job import JobError

from engines.megatron.tests.trial import trial_jobs
from engines.megatron.tests.trial.trial_jobs import DENSE, EXPERTS, NEEDS_MEGATRON
from flagcore.domain.launch import Exit, Launch
from flagcore.launchers.local import LocalLauncher
from tests.checks import within

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.together("training")]

PROGRAM = ["-m", "flagcore_megatron.trial"]
COPIES = {"data_parallel_size": 2}
ENDLESS = {"train_iters": 100_000}
MANY_KNOBS: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "use_recompute": True,
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}


def write_job(folder: Path, job: Any) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def start(folder: Path, job: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *PROGRAM, str(write_job(folder, job))],
        env=trial_jobs.environment(),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that its parent has not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Ran:
    """A job in the warm process: its exit code, its part of stderr and its folder."""

    code: int
    stderr: str
    folder: Path

    @property
    def metrics(self) -> Any:
        return json.loads((self.folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """A few jobs, of which some fail, run in one warm process in folders with the result of an earlier run."""
    folder, short = tmp_path_factory.mktemp("jobs"), {"train_iters": 1, "global_batch_size": 4}
    jobs = {
        "many knobs": trial_jobs.make_job(folder / "many", DENSE, train={"precision": "bf16"}, **MANY_KNOBS),
        "expert": trial_jobs.make_job(
            folder / "expert",
            EXPERTS,
            train=short,
            data_parallel_size=2,
            expert_model_parallel_size=2,
            sequence_parallel=True,
            use_recompute=False,
            recompute_granularity="full",
        ),
        "uneven": trial_jobs.make_job(
            folder / "uneven", DENSE, train=short, pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1
        ),
        "late": trial_jobs.make_job(folder / "late", DENSE, **COPIES, end_after_s=0.001, train={"train_iters": 9}),
        "illegal": trial_jobs.make_job(folder / "illegal", DENSE, tensor_model_parallel_size=3),
        "refused": trial_jobs.make_job(folder / "refused", DENSE, recompute_granularity="sometimes"),
        # 17 TB: the first allocation is refused.
        "huge": trial_jobs.make_job(folder / "huge", {**DENSE, "vocab_size": 2**36}),
    }
    for job in jobs.values():
        Path(job["output"]).mkdir()
        (Path(job["output"]) / "metrics.json").write_text("{}")
    codes, stderr = trial_jobs.run_jobs(folder, jobs)
    parts = re.split(r"^--- (.*)\n", stderr, flags=re.MULTILINE)[1:]
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: Ran(codes[name], said[name], Path(job["output"])) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def metrics(jobs: dict[str, Ran]) -> dict[str, Any]:
    """Metrics of the good jobs."""
    good = {name: ran for name, ran in jobs.items() if name not in ("illegal", "refused", "huge")}
    assert all(ran.code == 0 for ran in good.values()), [ran.stderr for ran in good.values()]
    return {name: ran.metrics for name, ran in good.items()}


def test_metrics_file_has_steps_memory_versions_and_start_up(metrics: dict[str, Any]) -> None:
    found = metrics["many knobs"]
    assert found["schema_version"] == 1
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    for step in found["steps"]:
        assert 0 < step["forward_backward_s"] + step["optimizer_s"] <= step["step_time_s"]
        assert step["loss"] > 0 < step["grad_norm"]
    assert found["num_microbatches"] == 8
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for rank in found["ranks"]:
        assert 0 < rank["peak_allocated_bytes"] < rank["device_used_bytes"]
        assert rank["peak_reserved_bytes"] is None
    assert set(found["versions"]) == {"torch", "megatron-core", "python"}
    assert set(found["startup_s"]) == {"import", "groups", "build"}


def test_a_job_without_time_for_its_steps_ends_after_two(metrics: dict[str, Any], jobs: dict[str, Ran]) -> None:
    assert [step["step"] for step in metrics["late"]["steps"]] == [0, 1]
    assert len((jobs["late"].folder / "steps.jsonl").read_text().splitlines()) == 2
    assert len(metrics["late"]["ranks"]) == 2


def test_effective_knobs_are_read_back(metrics: dict[str, Any]) -> None:
    effective = metrics["many knobs"]["effective"]
    ones = ("data_parallel_size", "context_parallel_size", "expert_model_parallel_size")
    derived = {
        **dict.fromkeys(ones, 1),
        "expert_tensor_parallel_size": 2,
        "layers_per_stage": [2, 2],
        "precision": "bf16",
        "implementation": "local",
        "overlap_p2p_comm": True,
    }
    on = {name: value for name, value in effective.items() if value}
    assert on == {**MANY_KNOBS, "micro_batch_size": 2, **derived}
    off = {name for name, value in effective.items() if value is False}
    assert off >= {"overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "moe_grouped_gemm"}


def test_flags_without_effect_are_read_back_as_off_and_uneven_stages_with_their_layers(metrics: dict[str, Any]) -> None:
    effective = metrics["expert"]["effective"]
    assert effective["expert_model_parallel_size"] == 2
    assert effective["sequence_parallel"] is False
    assert effective["use_recompute"] is False
    assert effective["recompute_granularity"] is None
    assert metrics["uneven"]["effective"]["layers_per_stage"] == [1, 3]


def test_configuration_that_megatron_refuses_exits_with_2_and_one_clear_line(jobs: dict[str, Ran]) -> None:
    illegal = jobs["illegal"]
    assert illegal.code == failures.INVALID
    first, *rest = illegal.stderr.splitlines()
    refusal = "num_attention_heads (4) must be a multiple of tensor_model_parallel_size (3)."
    assert first == f"invalid configuration: {refusal}"
    assert sum("Traceback" in line for line in rest) == 1  # of the first rank to fail, and of no other
    assert not (illegal.folder / "metrics.json").exists()


def test_job_that_cannot_be_read_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    program = start(tmp_path, trial_jobs.make_job(tmp_path / "out", DENSE, micro_batch_sise=1))
    _, stderr = program.communicate(timeout=60)
    assert program.returncode == failures.INVALID
    assert stderr.startswith("invalid configuration: ")
    assert "micro_batch_sise" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.long
def test_steps_are_written_while_the_trial_runs_and_sigterm_ends_its_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = start(tmp_path, trial_jobs.make_job(out, DENSE, train=ENDLESS, data_parallel_size=2))
    try:
        steps = out / "steps.jsonl"
        assert within(60, lambda: steps.exists() and steps.read_text().count("\n") > 2)
        pids = children(program.pid)
        assert len(pids) == 2
        lines = steps.read_text().splitlines()[:3]
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
        assert program.poll() is None
        program.terminate()
        assert program.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        program.kill()
        program.communicate()
    assert not any(is_running(pid) for pid in pids)
    assert not (out / "metrics.json").exists()


SLEEPING = """
import sys, time
from flagcore_training.trial import forked_ranks
sys.exit(forked_ranks.run_ranks(2, lambda rank, listener: time.sleep(300) or 0))
"""


@pytest.fixture
def sleeping() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process whose two ranks sleep: the process and its ranks."""
    command = [sys.executable, "-c", SLEEPING]
    program = subprocess.Popen(command, env=trial_jobs.environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert within(60, lambda: len(children(program.pid)) == 2)
        yield program, children(program.pid)
    finally:
        program.kill()
        program.communicate()


def test_killing_the_parent_leaves_no_rank(sleeping: tuple[subprocess.Popen[str], list[int]]) -> None:
    program, pids = sleeping
    program.kill()
    assert within(30, lambda: not any(is_running(pid) for pid in pids))


def test_sigterm_ends_the_ranks(sleeping: tuple[subprocess.Popen[str], list[int]]) -> None:
    program, pids = sleeping
    program.terminate()
    assert program.wait(timeout=30) == 128 + signal.SIGTERM
    assert not any(is_running(pid) for pid in pids)


def test_a_rank_that_dies_ends_the_others(sleeping: tuple[subprocess.Popen[str], list[int]]) -> None:
    program, pids = sleeping
    os.kill(pids[1], signal.SIGKILL)
    _, stderr = program.communicate(timeout=30)
    assert program.returncode == 128 + signal.SIGKILL
    assert stderr
    assert not any(is_running(pid) for pid in pids)


def test_the_first_failure_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int, listener: object) -> int:
        if rank == 2:
            time.sleep(60)
        if rank == 0:
            time.sleep(3)
        print(f"rank {rank} gives up", file=sys.stderr)
        return 4 + rank

    began = time.monotonic()
    assert ranks.run_ranks(3, work) == 5
    assert time.monotonic() - began < 10
    assert capfd.readouterr().err == "rank 1 gives up\n"


def test_out_of_memory_is_distinguished_from_other_failures() -> None:
    import torch

    assert failures.classify(torch.OutOfMemoryError("Tried to allocate 20 GiB")) == failures.OUT_OF_MEMORY
    assert failures.classify(RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes")) == 3
    assert failures.classify(MemoryError()) == failures.OUT_OF_MEMORY
    assert failures.classify(RuntimeError("connection closed by peer")) == failures.FAILED
    assert failures.classify(ValueError("not megatron's")) == failures.FAILED


def test_rank_that_the_kernel_killed_for_memory_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = iter([7, 8])
    monkeypatch.setattr(ranks, "_out_of_memory_kills", lambda: next(counts))

    def work(rank: int, listener: object) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert ranks.run_ranks(1, work) == failures.OUT_OF_MEMORY
    assert capfd.readouterr().err == "out of memory: the kernel killed rank 0\n"


def test_job_that_fails_exits_with_its_code_and_removes_results_of_an_earlier_run(jobs: dict[str, Ran]) -> None:
    refused, huge = jobs["refused"], jobs["huge"]
    assert (refused.code, huge.code) == (failures.INVALID, failures.OUT_OF_MEMORY)
    assert "out of memory: " in huge.stderr
    assert not [completed for completed in (refused, huge) if (completed.folder / "metrics.json").exists()]


def test_job_without_a_required_key_is_rejected() -> None:
    job = trial_jobs.make_job(Path("out"), DENSE)
    job["train"]["seed"] = None
    with pytest.raises(JobError):
        parse_job(job)


def test_zero_switches_an_optional_size_off() -> None:
    job = parse_job(trial_jobs.make_job(Path("out"), DENSE, num_layers_per_virtual_pipeline_stage=0))
    assert job.candidate.num_layers_per_virtual_pipeline_stage is None


def test_reading_jobs_imports_neither_torch_nor_megatron() -> None:
    code = "import sys; import flagcore_megatron.trial.__main__; print({'torch', 'megatron'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=trial_jobs.environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "set()\n", done.stderr


def run_to_end(
    launcher: LocalLauncher, folder: Path, device: str, *, warm: bool, preload: Sequence[str] = (), **split: int
) -> Exit:
    """Run a trial to its end; `cuda` is simulated on a CPU."""
    folder.mkdir()
    model = EXPERTS if device == "cpu" else DENSE
    job = trial_jobs.make_job(folder, model, train={"precision": "bf16"}, **split)
    job["device"] = {**job["device"], "type": device, "preload": list(preload)}
    packages = [Path(__file__).parent / "cpu_as_cuda", folder.parent] if device == "cuda" else []
    environment = {"PYTHONPATH": trial_jobs.environment(*packages)["PYTHONPATH"]}
    argv = (sys.executable, *PROGRAM, str(write_job(folder, job)))
    launch = Launch(argv=argv, folder=str(folder), environment=environment, warm=warm)
    exit_record = launcher.start(launch).wait(120)
    assert exit_record is not None
    assert exit_record.code == 0, (folder / "stderr.log").read_text()
    return exit_record


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_warm_and_cold_trials_measure_the_same(tmp_path: Path, device: str) -> None:
    """Also after a trial of another split has run in a fork of the same template."""
    launcher, measured = LocalLauncher(), dict[str, Any]()
    stages = {"pipeline_model_parallel_size": 2}
    try:
        for name, split in {"cold": COPIES, "first": stages, "warm": COPIES}.items():
            assert run_to_end(launcher, tmp_path / name, device, warm=name != "cold", **split).warm == (name != "cold")
            measured[name] = json.loads((tmp_path / name / "metrics.json").read_text())
    finally:
        launcher.close()
    warm, cold = measured["warm"], measured["cold"]
    for key in ("effective", "versions"):
        assert warm[key] == cold[key]
    figures = [[(step["loss"], step["grad_norm"]) for step in each["steps"]] for each in (warm, cold)]
    assert figures[0] == figures[1]
    for mine, other in zip(warm["ranks"], cold["ranks"], strict=True):
        assert mine["peak_allocated_bytes"] == pytest.approx(other["peak_allocated_bytes"], abs=4 << 20)
        assert mine["device_used_bytes"] == pytest.approx(other["device_used_bytes"], abs=16 << 20)
    assert warm["startup_s"]["import"] < 0.5 < cold["startup_s"]["import"]


@pytest.mark.long
def test_a_trial_starts_cold_if_a_module_initializes_the_device(tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text("import torch; torch.cuda.set_device(0)")
    assert not run_to_end(LocalLauncher(), tmp_path / "trial", "cuda", warm=True, preload=["eager"]).warm
