"""Megatron's log lines, as its code writes them, and what a failed run's output means: the cause, not torchrun's
error below it.

How trials start, and which ranks a probe plays."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.reading import MegatronLog, read_logs
from flagcore_training import reading
from flagcore_training.reading import FAILURES
from flagcore_vendorkit.metrics import NoMetrics

from flagcore.contracts import Launcher, RunningLaunch
from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Exit, Launch, classify
from flagcore.domain.model import Model
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control
from flagcore.domain.trial import TimeLimit
from flagcore.tuner.stages.launch import launch
from tests.product import tasks

ARGUMENTS = """\
using world size: 4, data-parallel size: 2, context-parallel size: 1, tensor-model-parallel size: 2
------------------------ arguments ------------------------
  micro_batch_size ................................ 2
  num_layers_per_virtual_pipeline_stage ........... None
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 2
-------------------- end of arguments ---------------------
"""


def iteration(number: int, milliseconds: str, loss: str = "1.084E+01", nans: str = "0") -> str:
    """One line of the last rank, with the figures that `--log-throughput` adds."""
    return (
        f" [2026-03-16 10:00:0{number % 10}.123456] iteration {number:8}/{5:8} | consumed samples: {number * 64:12} |"
        f" elapsed time per iteration (ms): {milliseconds} | throughput per GPU (TFLOP/s/GPU): 123.4 |"
        f" learning rate: 1.000000E-04 | global batch size: {64:5} | lm loss: {loss} | loss scale: 1.0 |"
        f" grad norm: 2.345 | number of skipped iterations:   0 | number of nan iterations: {nans:>3} |\n"
    )


def memory(rank: int, allocated: str, reserved: str) -> str:
    return (
        f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1000.5 | max allocated: {allocated} |"
        f" reserved: 2000.0 | max reserved: {reserved}\n"
    )


def read(folder: Path, text: str | bytes) -> MegatronLog:
    (folder / "stdout.log").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_logs(str(folder))


WHOLE, PLAIN = iteration(1, "10.0"), " iteration {}/ 5 | elapsed time per iteration (ms): 9.0 | {} |\n"
NOISE = bytes(range(256)) * 50 + b"\niteration of the loop | done\nTheoretical memory footprints: total=1 MB\n"
NO_LOSS = [PLAIN.format(1, "number of skipped iterations:   1"), PLAIN.format(2, "loss scale: 1.0 | grad norm: nan")]
READ: dict[str, tuple[str | bytes, list[float], list[float | None]]] = {
    "seconds in order": (ARGUMENTS + iteration(1, "1000.5") + iteration(2, "2000.5"), [1.0005, 2.0005], [10.84, 10.84]),
    "an iteration without a number": (WHOLE + iteration(2, "10.0", nans="1"), [0.01, 0.01], [10.84, None]),
    "a line without a loss": (PLAIN.format(1, "learning rate: 1E-4"), [0.009], []),
    "skipped, then no number": ("".join(NO_LOSS), [0.009, 0.009], [None]),
    "an incomplete line": (WHOLE + WHOLE[: WHOLE.index("10.0") + 2], [0.01], [10.84]),
    "noise": (NOISE + WHOLE.encode() + NOISE, [0.01], [10.84]),
    "a line of several ranks": (f"[default0]:{WHOLE}[default3]:{WHOLE}", [0.01], [10.84]),
    "other text before it": (f"Number of parameters in billions:  0.00{WHOLE}", [0.01], [10.84]),
    **{
        f"the loss {loss}": (iteration(1, "10.0", loss=loss), [0.01], [None])
        for loss in ("nan", "NaN", "inf", "-inf", "nan.", "-", "e", "1e999", "error", "--1")
    },
}


@pytest.mark.parametrize("name", READ)
def test_steps_and_losses_are_read_from_lines(tmp_path: Path, name: str) -> None:
    text, seconds, losses = READ[name]
    log = read(tmp_path, text)
    assert (log.step_times_s, log.losses) == (seconds, losses)
    assert [step.skipped for step in log.steps.values()] == ["skipped" in name, *[False] * (len(seconds) - 1)]


def test_memory_is_the_largest_of_all_ranks_in_bytes(tmp_path: Path) -> None:
    log = read(tmp_path, memory(0, "1500.25", "2500.0") + memory(2, "1700.0", "2400.0"))
    assert (log.peak_allocated_bytes, log.peak_reserved_bytes) == (1700 << 20, 2500 << 20)


def test_arguments_are_those_that_megatron_printed_first(tmp_path: Path) -> None:
    log = read(tmp_path, ARGUMENTS + "  micro_batch_size ................................ 16\n")
    assert log.arguments["micro_batch_size"] == "2"
    assert log.arguments["num_layers_per_virtual_pipeline_stage"] == "None"
    assert log.arguments["sequence_parallel"] == "True"
    for prefix in ("0: ", "[default3]:"):
        line = f"{prefix}  tensor_model_parallel_size ................................ 2\n"
        assert read(tmp_path, line).arguments == {"tensor_model_parallel_size": "2"}


@pytest.mark.parametrize(
    "figure", ["1.2.3", "...", "9" * 400, "0.0", "-5.0", "nan", "inf", "-inf", "1e999", "1_0_0", "0x10", "--"]
)
def test_an_unusable_time_is_named_and_left_out(tmp_path: Path, figure: str) -> None:
    log = read(tmp_path, iteration(1, figure) + memory(0, "1" * 400, figure) + iteration(2, "20.0"))
    assert (log.step_times_s, log.unusable) == ([0.02], {1: figure})


def test_both_logs_are_read_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_text(iteration(1, "40.0"))
    assert read_logs(str(tmp_path)).step_times_s == [0.04]
    assert read_logs(str(tmp_path / "missing")).step_times_s == []


def test_the_limit_of_a_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_LOG", 2 << 20)
    log = read(tmp_path, iteration(1, "10.0") + "x\n" * (3 << 20) + iteration(2, "20.0"))
    assert (log.step_times_s, log.files.note) == ([0.01], "; only the first 2 MiB of stdout.log were read")


def test_steps_after_a_long_line_and_in_later_calls_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BYTES_PER_CALL", 1 << 20)
    lines, text = list[str](), WHOLE + "x" * (5 << 20) + WHOLE + WHOLE
    files = reading.LogFiles(str(tmp_path), lines.append)
    for cut in (len(WHOLE) // 2, len(WHOLE) + 9000, len(text) - 3, len(text)):
        (tmp_path / "stdout.log").write_text(text[:cut])
        for _call in range(7):
            files.read()
    assert [len(line) for line in lines] == [len(WHOLE) - 1, reading.LONGEST_LINE, len(WHOLE) - 1]


def test_an_endless_log_line_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_LOG", 16 << 20)
    file = tmp_path / "stdout.log"
    with file.open("wb") as endless:
        endless.truncate(20 << 30)
    began = time.monotonic()
    assert read_logs(str(tmp_path)).step_times_s == []
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_adversarial_lines_are_matched_quickly(tmp_path: Path) -> None:
    began = time.process_time()
    read(tmp_path, ("iteration 1/ 1 |" * 20_000 + "\n") * 3 + "a" * 300_000 + " ..." * 100_000)
    assert time.process_time() - began < 5


def test_an_invalid_memory_line_is_left_out(tmp_path: Path) -> None:
    line = "[Rank 0] (after 2 iterations) memory (MB) | max allocated: 1{} | reserved: 1 | max reserved: 2"
    log = read(tmp_path, line.format("0" * 305) + "\n" + line.format("") + "\n")
    assert log.peak_allocated_bytes == 1 << 20


def test_logs_of_ranks_below_the_trials_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "none_x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text(iteration(1, "10.0"))
    (tmp_path / "stdout.log").write_text(iteration(1, "10.0") + iteration(2, "20.0"))
    assert read_logs(str(tmp_path)).step_times_s == [0.01, 0.02]


TORCHRUN = """\
W1121 16:37:35.812000 7400 elastic/multiprocessing/api.py:1028] Sending process 7408 closing signal SIGTERM
E1121 16:37:35.904000 7400 elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 7409)
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/job/pretrain_gpt.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 7409)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
ASSERTION = """\
Traceback (most recent call last):
  File "/job/megatron/training/arguments.py", line 412, in validate_args
    assert args.world_size % total_model_size == 0, (
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError: world size (2) is not divisible by total_model_size (total_model_size=3)
"""
BARE = """\
[rank1]:   File "/job/megatron/core/optimizer_param_scheduler.py", line 89, in __init__
[rank1]:     assert self.lr_warmup_steps < self.lr_decay_steps
[rank1]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank1]: AssertionError
"""
NAN = """\
ERROR:megatron.core:Unexpected result nan on rank 0 at iteration #2 (message='found NaN in local forward loss')
[rank0]: TypeError: expected str, bytes or os.PathLike object, not NoneType
"""
MEMORY = """\
[rank1]:     raise torch.OutOfMemoryError(
[default0]:[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total
[rank0]: RuntimeError: NCCL error: remote process exited
"""
ARGUMENT = "pretrain_gpt.py: error: argument --micro-batch-size: invalid int value: 'two'"
LINKER = "/usr/bin/ld: cannot open output file helpers_cpp.so: Read-only file system"
PEER = """\
[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40210 (gloo)
[rank1]: IndexError: index out of range in self
"""
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL"
CAUSES = {
    "assertion": (ASSERTION, "invalid", "AssertionError: world size (2) is not divisible by"),
    "assertion without a message": (BARE, "invalid", "assert self.lr_warmup_steps < self.lr_decay_steps"),
    "argument": (ARGUMENT, "invalid", "pretrain_gpt.py: error: argument --micro-batch-size"),
    "argument behind a prefix": (f"[default1]:{ARGUMENT}", "invalid", "pretrain_gpt.py: error: argument"),
    "refusal of a rank": (
        "[rank1]: ValueError: num_attention_heads (1) must be a multiple of tensor_model_parallel_size (2).",
        "invalid",
        "ValueError: num_attention_heads (1)",
    ),
    "the trial program's word": ("invalid configuration: heads", "invalid", "invalid configuration: heads"),
    "a hang that was noticed": (WATCHDOG, "timed_out", WATCHDOG),
    "memory": (MEMORY, "out_of_memory", "torch.OutOfMemoryError: CUDA out of memory."),
    "no number": (NAN, "failed", "Unexpected result nan on rank 0"),
    "no transformer-engine": (
        "[rank1]: NameError: name 'TESpecProvider' is not defined. Did you mean: 'LocalSpecProvider'?",
        "failed",
        "NameError: name 'TESpecProvider' is not defined",
    ),
    "another error beside a broken connection": (PEER, "failed", "IndexError: index out of range in self"),
    "a full disk": ("[rank0]: OSError: [Errno 28] No space left on device", "failed", "OSError: [Errno 28]"),
    "a helper that cannot be built": (f"{LINKER}\n{PEER.splitlines()[0]}", "failed", LINKER),
    "a rank that was killed": ("", "failed", "failed (exitcode: -9) local_rank: 1"),
    "a rank that waits for ever": (
        "[rank0]: RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation",
        "timed_out",
        "RuntimeError: ",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_above_torchruns_error_is_the_reason(name: str) -> None:
    text, expected, reason = CAUSES[name]
    code = 1 if text else -9
    ended = Exit(code=1, ended_by=None, duration_s=9.0)
    state, found = classify(ended, text + "\n" + TORCHRUN.format(code=code), FAILURES)
    assert state.value == expected
    assert found.startswith(reason)


def test_an_error_without_a_known_cause_is_reported_by_its_exit_code() -> None:
    state, reason = classify(Exit(code=1, ended_by=None, duration_s=9.0), TORCHRUN.format(code=1), FAILURES)
    assert state.value == "failed"
    assert "exit code 1" in reason


def test_lines_of_many_prefixes_are_searched_quickly() -> None:
    started = time.monotonic()
    classify(Exit(code=1, ended_by=None, duration_s=9.0), ("[rank0]: " * 450 + "\n") * 64, FAILURES)
    assert time.monotonic() - started < 5.0  # it takes 0.1 s, and 18 s if the prefixes are tried one after the other


LONG = tasks.task(global_batch_size=512, control=Control(max_step_time=60.0))


@pytest.mark.parametrize(
    ("data", "pipeline", "micro", "share", "batch"),
    [
        (1, 1, 1, 0.001, 4),  # the fewest micro-batches
        (8, 1, 2, 0.1, 64),
        (4, 8, 1, 0.001, 64),  # two a stage
        (4, 8, 1, 0.15, 96),  # 19.2 of 128 micro-batches, a multiple of 8
        (16, 16, 1, 0.001, None),  # 32 micro-batches are what fills 16 stages
        (16, 8, 1, 0.9, None),
    ],
)
def test_the_pipeline_is_filled_and_the_batch_is_legal(
    data: int, pipeline: int, micro: int, share: float, batch: int | None
) -> None:
    candidate = tasks.candidate(data_parallel_size=data, pipeline_model_parallel_size=pipeline, micro_batch_size=micro)
    assert ENGINE.shorter_batch(LONG, candidate, share) == batch


class Recorder(Launcher):
    """Keeps the launch that it is asked to start."""

    name = "recorder"

    def start(self, launch: Launch) -> RunningLaunch:
        self.launched = launch
        raise InterruptedError


@pytest.mark.parametrize(
    ("device", "changes", "cold", "warm"),
    [
        ("cpu", {}, False, True),
        ("cpu", {}, True, False),
        ("cpu", {"control": Control(warm_start=False)}, False, False),
        ("cpu", {"command": ("python", "-m", "train")}, False, False),
        ("cuda", {}, False, True),
    ],
)
def test_only_the_trial_program_starts_warm(
    tmp_path: Path, device: str, changes: dict[str, Any], cold: bool, warm: bool
) -> None:
    task = tasks.task(devices=2, **changes)
    support = EngineSupport(support=Support.YES, device_type=device, distributed_backend="gloo")
    recorder, limit = Recorder(), TimeLimit(seconds=1.0, because="")
    with pytest.raises(InterruptedError):
        launch(tasks.platform(task, support=support), recorder, tasks.candidate(), str(tmp_path), limit, cold=cold)
    assert recorder.launched.warm is warm


DEEP = dataclasses.replace(tasks.DENSE, num_layers=16, hidden_size=1024, ffn_hidden_size=4096, kv_channels=256)
SPARSE = dataclasses.replace(
    DEEP, num_moe_experts=4, moe_router_topk=1, moe_ffn_hidden_size=8, moe_first_dense_layers=12, vocab_size=64
)
STEP = {"compute_s": 2.0, "optimizer_s": 0.5}
METRICS: dict[str, Any] = {
    "stage": 1,
    "steps": [{"compute_s": 9.0, "optimizer_s": 9.0}, STEP, {**STEP, "compute_s": 4.0}, STEP],
    "static_bytes": 10,
    "peak_forward_backward_bytes": 30,
    "peak_optimizer_bytes": 20,
    "peak_allocated_bytes": 30,
    "peak_reserved_bytes": None,
    "device_used_bytes": 40,
    "num_microbatches": 8,
    "microbatches_run": 4,
    "versions": {"torch": "2"},
}


def ranks(model: Model, devices: int, **knobs: int) -> tuple[int, ...]:
    task = tasks.task(model, devices=devices, global_batch_size=64)
    return ENGINE.probes.ranks(task, Candidate.of(knobs), tasks.costs(task))


def test_a_world_of_one_stage_is_probed_by_its_first_rank() -> None:
    assert ranks(DEEP, 8, data_parallel_size=8) == (0,)


def test_first_and_last_stage_are_probed_by_their_first_ranks() -> None:
    found = ranks(DEEP, 32, data_parallel_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert {0, 24} <= set(found)
    assert all(rank % 8 == 0 for rank in found)


def test_stage_that_takes_longest_is_probed() -> None:
    """Here a middle one: the others have an embedding or a head, but a small vocabulary and fewer layers."""
    model = dataclasses.replace(DEEP, vocab_size=64)
    task = tasks.task(
        model,
        devices=4,
        global_batch_size=64,
        settings={"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1},
    )
    knobs = Candidate.of({"pipeline_model_parallel_size": 4})
    assert ENGINE.probes.ranks(task, knobs, tasks.costs(task)) == (0, 1, 3)


def test_the_stage_with_experts_is_probed_if_others_are_dense() -> None:
    """Dense layers are in the first stages; the few experts are small."""
    model = dataclasses.replace(SPARSE, moe_first_dense_layers=8)
    found = ranks(model, 8, pipeline_model_parallel_size=4, data_parallel_size=2, expert_model_parallel_size=2)
    assert any(rank // 2 >= 2 for rank in found)


def test_figures_are_medians_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    found = ENGINE.probes.read(tasks.task(), str(tmp_path))
    assert (found.compute_time_s, found.optimizer_time_s, found.steps) == (2.0, 0.5, 3)
    assert (found.compute_spread_s, found.optimizer_spread_s) == (1.0, 0.0)
    assert (found.stage, found.peak_allocated_bytes, found.reserved_bytes) == (1, 30, None)
    assert (found.microbatches, found.microbatches_run) == (8, 4)


@pytest.mark.parametrize("missing", ["stage", "steps", "static_bytes", "versions", "warm-up"])
def test_missing_parts_and_steps_of_the_warm_up_alone_are_reported(tmp_path: Path, missing: str) -> None:
    steps = METRICS["steps"][:1] if missing == "warm-up" else METRICS["steps"]
    found = {key: value for key, value in {**METRICS, "steps": steps}.items() if key != missing}
    (tmp_path / "metrics.json").write_text(json.dumps(found))
    with pytest.raises(NoMetrics, match=missing):
        ENGINE.probes.read(tasks.task(), str(tmp_path))
