"""Step times, losses and memory in log lines that real programs printed."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_testing.package import joined_texts
from flagcore_trainers.logs import FORMATS, TIMED, Log, Patterns

from tests.product.tasks import task

LOGS = joined_texts(Path(__file__).with_name("logs.txt").read_text())
OWN = "step 1/9 loss 6.25 took 100.00 msstep 1/9 loss 6.25 took 120.00 ms\nstep 2/9 loss nan took 90 ms\npeak 1.5 GiB\n"


@pytest.mark.parametrize(
    ("name", "seconds", "losses", "gib"),
    [
        ("megatron", [86.5452, 87.8716], [2.50422, 2.493043], None),
        ("deepspeed", [16.069, 16.053], [], 15.59),
        ("torchtitan", [4096 / 10050 / 4, 4096 / 10007 / 4], [7.62585, 7.07623], 66.91),
        ("huggingface", [1.5, 1.25], [2.4871, 2.3517, 2.1044], None),
        ("own", [0.1, 0.09], [6.25, None], 1.5),
    ],
)
def test_lines_of_programs_are_read(name: str, seconds: list[float], losses: list[Any], gib: float | None) -> None:
    steps = [FORMATS[each] for each in TIMED] if name in TIMED else [FORMATS.get(name, "")]
    patterns = Patterns(steps=steps)
    if name == "own":
        step = r"step (?P<step>\d+)/.*? loss (?P<loss>\S+) took (?P<ms>[\d.]+) ms"
        patterns = Patterns(steps=[step], memory_gib=r"peak ([\d.]+) GiB")
    log = Log("", task(seq_length=512, devices=4), patterns)
    for line in (OWN if name == "own" else LOGS[name]).splitlines():
        log.add(line)
    assert list(log.times.values()) == pytest.approx(seconds, abs=2e-3)
    assert log.losses == losses
    assert log.peak_bytes == (gib and int(gib * 2**30))


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [("30,0", 0.03), ("0,125", 125e-6), ("1,234.5", 1.2345), ("1,234,567", 1234.567), ("86.5,", 0.0865)],
)
def test_a_comma_is_a_decimal_one_unless_it_separates_thousands(stated: str, seconds: float) -> None:
    log = Log("", task(), Patterns(steps=[r"step (?P<step>\d+) (?P<ms>\S+) ms"]))
    log.add(f"step 1 {stated} ms")
    assert log.times["1"] == pytest.approx(seconds)
    log.add("step 2 1.234,5 ms")
    assert (len(log.times), log.unusable) == (1, ["1.234,5"])


def test_colours_and_utf_16_are_read_and_two_times_are_not_guessed() -> None:
    step = r"step (?P<step>\d+) (?:(?P<ms>[\d.]+) ms)?(?: or )?(?:(?P<s>[\d.]+) s)?"
    log = Log("", task(), Patterns(steps=[step]))
    damaged = "step 4 0.0\x001 s"
    for line in ("step \x1b[32m1\x1b[0m 60 ms", "\0".join("step 2 0.06 s"), damaged, "\0step 3 60 ms or 60 s"):
        log.add(line)
    assert list(log.times.values()) == pytest.approx([0.06, 0.06])
    assert (log.unusable, log.last) == (["60 s and 60 ms"], "step 3 60 ms or 60 s")


def test_lines_of_several_steps_are_divided_by_their_number() -> None:
    log = Log("", task(), Patterns(steps=[r"step (?P<step>\d+)"]))
    for line in ("[at 1.000000] step 10", "[at 5.000000] step 20"):
        log.add(line)
    assert list(log.times.values()) == [pytest.approx(0.4)]


def test_a_pattern_that_takes_too_long_ends_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore_trainers.logs.SEARCH_SECONDS", 0.05)
    (tmp_path / "stdout.log").write_text(",".join(map(str, range(36))) + "\nstep 2\n")
    log = Log(str(tmp_path), task(), Patterns(steps=[r"(?P<step>\d*)*(.*?,){25}P"]))
    assert len(log()) == task().spec.control.train_iters
    assert "takes more than 0.05 s on the line '0,1,2" in log.too_slow


def test_many_slow_lines_end_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore_trainers.logs.SLOW_SECONDS", 0.0)
    monkeypatch.setattr("flagcore_trainers.logs.MAX_SLOW_SECONDS", 0.005)
    (tmp_path / "stdout.log").write_text("step 1 20 ms\n" * 20_000)
    log = Log(str(tmp_path), task(), Patterns(steps=[r"step (?P<step>\d+) (?P<ms>\S+) ms"]))
    log()
    assert "s in total" in log.too_slow


PLAIN = r"step (?P<step>\d+) took (?P<ms>\S+) ms"


@pytest.mark.parametrize(
    ("pattern", "line", "unusable"),
    [
        *(
            (PLAIN, f"step 1 took {each} ms", each)
            for each in ("0", "-3", "nan", "inf", "-inf", "1e999", "1_0", "1.2.3", "0x10", "--", "ms", "9" * 400)
        ),
        (r"step (?P<step>\d+) rate (?P<tokens_per_s>\S+)", "step 1 rate inf", "inf"),
        (r"step (?P<step>\d+) rate (?P<tokens_per_s>\S+)", "step 1 rate 0", "0"),
        (r"step (?P<step>\d+) rate (?P<samples_per_s>\S+)", "step 1 rate -1", "-1"),
        (PLAIN, "\0".join("step 1 took nan ms"), "nan"),
        (PLAIN, "x" * 9000 + " step 1 took 20 ms", None),
        (PLAIN, "step \N{SUPERSCRIPT TWO} took 20 ms", None),
        (PLAIN, "", None),
        (r"(?P<step>a+)$ (?P<ms>x)", "a" * 9000, None),
    ],
)
def test_odd_lines_are_named_or_left_out(tmp_path: Path, pattern: str, line: str, unusable: str | None) -> None:
    (tmp_path / "stdout.log").write_text(f"{line}\n")
    log = Log(str(tmp_path), task(), Patterns(steps=[pattern]))
    assert log(unfinished=True) == ()
    assert log.unusable == ([unusable] if unusable else [])
