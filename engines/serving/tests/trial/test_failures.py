"""What a log says went wrong first, whatever stands at its end."""

from pathlib import Path

import pytest
from flagcore_llamacpp.profile import ENGINE as LLAMACPP_ENGINE
from flagcore_serving.engine import ServingEngine
from flagcore_serving.trial import failures
from flagcore_serving.trial.failures import PATTERNS, TrialFailure, first_error, log_text, server_failure
from flagcore_sglang.profile import ENGINE as SGLANG_ENGINE
from flagcore_vllm.profile import ENGINE as VLLM_ENGINE

from flagcore.domain.launch import LONGEST_REASON, Exit, FailurePattern, classify
from flagcore.domain.trial import TrialState


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("INFO: fine\nTypeError: a\nValueError: b\n", "TypeError: a"),
        ("error: no such flag\nValueError: b\n", "ValueError: b"),
        ("ready\nfatal: it broke\nbye\n", "fatal: it broke"),
        ("WARNING: TypeError: harmless\nready\nbye\n", "bye"),
        ("(EngineCore pid=7) WARNING 11-25 04:00:00 [cuda.py:88] RuntimeError: no NVML\nready\nbye\n", "bye"),
        ("ImportError: x, falling back to y\nValueError: b\nbye\n", "ValueError: b"),
        ("", ""),
    ],
)
def test_without_a_pattern_the_reason_is_an_exception_or_an_error_or_the_last_line(log: str, line: str) -> None:
    assert first_error(log, ()) == (None, line)
    if "WARNING" in log:
        assert first_error(log, VLLM_ENGINE.reports.failures) == (None, line)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [VLLM_ENGINE, SGLANG_ENGINE, LLAMACPP_ENGINE])
@pytest.mark.parametrize("line", ["x" * 2000, "a." * 1000])
def test_long_single_word_lines_are_searched(engine: ServingEngine, line: str) -> None:
    log = f"{line}\n" * 500 + "ValueError: at last"
    assert first_error(log, engine.reports.failures)[1] == "ValueError: at last"


def test_out_of_memory_is_classified_before_its_consequences() -> None:
    patterns = (
        FailurePattern(pattern="ValueError", state=TrialState.INVALID),
        FailurePattern(pattern="out of memory", state=TrialState.OUT_OF_MEMORY, advice="use less"),
    )
    assert first_error("ValueError: x\nCUDA out of memory", patterns) == (
        TrialState.OUT_OF_MEMORY,
        "CUDA out of memory (use less)",
    )


def test_the_beginning_and_end_of_a_long_log_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "HEAD_BYTES", 20)
    monkeypatch.setattr(failures, "TAIL_BYTES", 10)
    (tmp_path / "log").write_text("first line" + "x" * 100 + "\nlast line")
    text = log_text(tmp_path / "log")
    assert text.startswith("first line")
    assert text.endswith("last line")
    assert len(text) == 31
    assert log_text(tmp_path / "none") == ""


def test_a_server_crash_under_load_is_reported_with_its_error_and_no_harmless_lines(tmp_path: Path) -> None:
    begun = "ImportError: fast_kernels is not there\nready\n"
    (tmp_path / "log").write_text(begun + "slot 3 is free\nbus error in worker 1\nslot 4 is free\n")
    assert "its log: bus error in worker 1" in str(
        server_failure("instance 0", "ended", tmp_path / "log", (), len(begun))
    )
    (tmp_path / "log").write_text("listening\nerrors are ignored\nPOST /v1/completions 200\n")
    reported = str(server_failure("instance 0", "ended with signal 11", tmp_path / "log", ()))
    assert "its log names no error, and ends: POST /v1/completions 200" in reported


def test_a_server_that_the_system_killed_was_probably_too_large(tmp_path: Path) -> None:
    assert server_failure("instance 0", "ended with signal 9", tmp_path / "log", ()).state is TrialState.OUT_OF_MEMORY
    assert server_failure("instance 0", "ended with signal 11", tmp_path / "log", ()).state is TrialState.FAILED


@pytest.mark.parametrize("state", failures.PREFIXES)
def test_final_messages_of_the_program_are_classified(state: TrialState) -> None:
    line = str(TrialFailure(state, "it\nsaid " + "much " * 200))
    ended = Exit(code=1, ended_by=None, duration_s=1.0)
    found, reason = classify(ended, f"load 1 of 1\n{line}\n", PATTERNS)
    assert (found, reason) == (state, line.removeprefix(f"{state.value.replace('_', ' ')}: "))
    assert len(line) <= LONGEST_REASON
