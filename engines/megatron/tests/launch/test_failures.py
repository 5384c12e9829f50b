"""What the output of a failed run means: the cause, not torchrun's error below it.

The lines are those of Megatron-LM 0.15 and torch 2.13, from runs on a CPU.
"""

import pytest
from flagcore_training.reading import FAILURES

from flagcore.domain.launch import Exit, classify

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
