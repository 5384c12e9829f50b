"""Records of the domain: names of chips, values of knobs, figures of servers, and trials."""

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flagcore.domain.chip import Chip, similar_chips, slow_devices, unknown_chip_hint
from flagcore.domain.knob import Effect, Flag, Knob
from flagcore.domain.metrics import nest_statistics
from flagcore.domain.space import pareto
from flagcore.domain.spec import figure_name, is_rate, objective_value, seconds
from flagcore.domain.steps import steps_in_time, warmup_steps
from flagcore.domain.trial import Measurement
from tests import tasks
from tests.checks import refuses

SIZE = Knob(
    name="size", maximum=64, neutral=1, passes_neutral=True, auto=lambda task: (1, 2), flags=(Flag(name="size"),)
)
CHUNK = Knob(name="chunk", minimum=0, spellings={"off": -1}, flags=(Flag(name="chunk"),))
SWITCH = Knob(name="switch", kind="flag", neutral=False, flags=(Flag(name="switch", off="no-switch"),))
WORD = Knob(name="word", kind="word", words=("on", "full"))
SHARE = Knob(name="share", kind="share")
LISTED = Knob(name="listed", neutral=False, effects={True: Effect(environment={"LISTED": "1"})})


@pytest.mark.parametrize(
    ("knob", "given", "value"),
    [
        (SIZE, 8, 8),
        (SIZE, None, 1),
        (CHUNK, 0, None),
        (CHUNK, "off", -1),
        (SWITCH, True, True),
        (WORD, True, "on"),
        (WORD, "full", "full"),
        (SHARE, 0.95, "0.95"),
        (SHARE, "0.5", "0.5"),
        (LISTED, True, True),
    ],
)
def test_valid_values_are_parsed(knob: Knob, given: Any, value: Any) -> None:
    found = knob.parse(given, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("knob", "given"),
    [(SIZE, 0), (SIZE, 65), (SIZE, True), (SIZE, "8"), (SWITCH, 1), (WORD, "ful"), (SHARE, 1.5), (LISTED, 1)],
)
def test_an_invalid_value_is_an_error_with_key_value_and_fix(knob: Knob, given: Any) -> None:
    with refuses("auto_tuner.space.x", given) as error:
        knob.parse(given, "auto_tuner.space.x")
    assert error.value.fix


def test_flags_follow_the_release_of_the_engine() -> None:
    knob = Knob(name="size", flags=(Flag(name="new-size", versions=">=0.12"), Flag(name="size")))
    assert knob.arguments(4, "0.12.1") == ("--new-size", "4")
    assert knob.arguments(4, "0.11.0") == ("--size", "4")
    assert knob.arguments(None, "0.12.1") == ()


def test_a_neutral_value_needs_no_flag_unless_it_is_explicit() -> None:
    assert SIZE.arguments(1) == ("--size", "1")
    assert SWITCH.arguments(False) == ()
    assert SWITCH.arguments(True) == ("--switch",)
    usually_on = Knob(name="switch", kind="flag", neutral=True, flags=SWITCH.flags)
    assert usually_on.arguments(False) == ("--no-switch",)
    assert Knob(name="list", kind="words", flags=(Flag(name="list"),)).arguments("a,b") == ("--list", "a", "b")


def test_the_values_of_a_space_are_listed_or_those_of_auto() -> None:
    assert tasks.task(space={"size": (4, 4, 8)}).listed_values(SIZE, "auto") == (4, 8)
    assert tasks.task().listed_values(SIZE, "auto") == (1, 2)
    assert tasks.task().listed_values(SIZE, (1,)) == (1,)


NAMES = {"X100-SXM": ("ACME X100 80GB HBM3",), "X100-PCIe": (), "X200": (), "BI-V150": ("天垓150",)}
CHIPS = [Chip(name=name, vendor="acme", aliases=aliases) for name, aliases in NAMES.items()]


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("X100", ("X100-SXM", "X100-PCIe")),
        ("x100 sxm", ("X100-SXM",)),
        ("acme x100", ("X100-SXM", "X100-PCIe")),
        ("ACME X100 NVL", ("X100-PCIe", "X100-SXM")),
        ("acme", ()),
        ("X100-SXM-80GB", ("X100-SXM",)),
        ("X20", ("X200",)),
        ("x2OO", ("X200",)),
        ("X1000", ("X100-PCIe", "X100-SXM")),
        ("BIV510", ("BI-V150",)),
        ("天垓", ("BI-V150",)),
        ("", ()),
        ("x", ()),
        ("unobtainium", ()),
    ],
)
def test_chips_near_a_word_come_likeliest_first(word: str, names: tuple[str, ...]) -> None:
    assert similar_chips(word, CHIPS) == names


def test_a_number_is_no_part_of_a_longer_one() -> None:
    chips = [*CHIPS, Chip(name="X10", vendor="acme")]
    assert similar_chips("X100-SXM-80GB", chips) == ("X100-SXM",)


def test_a_short_word_is_near_only_words_with_its_first_letter() -> None:
    chips = [Chip(name="PPU-Z1", vendor="acme")]
    assert similar_chips("cpu", chips) == ()
    assert similar_chips("ppt", chips) == ("PPU-Z1",)


def test_a_word_without_a_near_match_gets_all_words() -> None:
    assert unknown_chip_hint("unobtainium", CHIPS).startswith("known chips: BI-V150, X100-PCIe, X100-SXM, X200; ")
    assert unknown_chip_hint("ACME", CHIPS).endswith("one of its chips: BI-V150, X100-PCIe, X100-SXM, X200")
    assert unknown_chip_hint("X100", CHIPS).startswith("did you mean X100-SXM or X100-PCIe? ")


def test_statistics_of_a_latency_are_grouped() -> None:
    figures = {"ttft_s.mean": 1.0, "requests_per_s": 2.0, "ttft_s.p99": 3.0}
    assert nest_statistics(figures) == {"ttft_s": {"mean": 1.0, "p99": 3.0}, "requests_per_s": 2.0}


@pytest.mark.parametrize(
    ("objective", "name", "rate"),
    [
        ("output_tokens_per_s", "output_tokens_per_s", True),
        ("ttft_s", "ttft_s.mean", False),
        ("tpot_s.p99",) * 2 + (False,),
    ],
)
def test_an_objective_converts_to_seconds_and_back(objective: str, name: str, rate: bool) -> None:
    assert figure_name(objective) == name
    assert is_rate(objective) is rate
    assert seconds(objective, 4.0) == (0.25 if rate else 4.0)
    assert objective_value(objective, seconds(objective, 4.0)) == 4.0


def test_the_rate_of_training_is_scaled_from_a_measurement() -> None:
    measured = Measurement(step_times_s=(2.0,), step_time_s=2.0, spread_s=0.0, tokens_per_second_per_device=100.0)
    assert objective_value("tokens_per_second_per_device", 1.0, measured) == 200.0
    assert objective_value("tokens_per_second_per_device", 1.0, replace(measured, step_time_s=4.0)) == 400.0
    assert is_rate("tokens_per_second_per_device")


def test_the_front_has_the_points_that_no_other_point_exceeds_in_both() -> None:
    first = np.array([1.0, 5.0, 3.0, 5.0, 2.0, np.nan])
    assert pareto(first, np.array([9.0, 1.0, 4.0, 2.0, 3.0, 99.0])).tolist() == [3, 2, 0]
    assert pareto(np.zeros(0), np.zeros(0)).tolist() == []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([9.0, 1.0, 1.01, 1.0, 1.0], 4),
        ([1.0, 1.0, 1.0], 10),  # the first step does not count
        ([9.0, 1.02, 1.01, 1.0, 0.99, 0.98], 10),  # becomes faster throughout
        ([9.0, 1.0, 1.05, 1.0, 1.05], 10),
        ([9.0, 3.0, 1.5, 1.0, 1.01, 1.0], 6),
        ([], 10),
    ],
)
def test_warm_up_ends_after_three_steady_steps(steps: list[float], expected: int) -> None:
    assert warmup_steps(steps, 10) == expected
    assert warmup_steps(steps, 3) == 3


@pytest.mark.parametrize("noise", [0.005, 0.016, 0.04])
@pytest.mark.parametrize("decay", [0.5, 2.0, 5.0])
def test_the_measured_time_is_that_after_the_whole_warm_up(noise: float, decay: float) -> None:
    draw, early, late = random.Random(0), [], []
    for _ in range(1000):
        steps = [1.0 + 0.5 * math.exp(-number / decay) + draw.gauss(0.0, noise) for number in range(30)]
        warmup = warmup_steps(steps, 10)
        early.append(statistics.median(steps[warmup : warmup + 20]))
        late.append(statistics.median(steps[10:]))
    assert abs(statistics.fmean(early) - statistics.fmean(late)) < 0.2 * statistics.pstdev(late)


@pytest.mark.parametrize(
    ("steps", "seconds", "expected"),
    [
        ([], 0.0, 8),
        ([9.0], 62.0, 7),
        ([9.0], 63.0, 8),
        ([9.0, 2.0, 4.0], 10.0, 6),  # the first one does not count
        ([9.0, 2.0], -5.0, 2),
        ([2.0] * 8, 0.0, 8),
    ],
)
def test_the_steps_that_fit_in_the_remaining_time(steps: list[float], seconds: float, expected: int) -> None:
    assert steps_in_time(steps, 8, seconds) == expected


@pytest.mark.parametrize(
    ("name", "figures", "line"),
    [
        ("speed_test_s", (1.0, 1.02, 0.98, 1.0, 1.0, 1.0, 1.4, 1.01), "device 2 of node 1 takes 1.4x the median time"),
        ("clock_hertz", (1.98e9, 1.98e9, 1.2e9, 1.95e9), "device 2 of node 0 runs at 0.61x the median clock"),
        ("speed_test_s", (3.0, 1.0), "device 0 of node 0 takes 3x"),
        *(("speed_test_s", figures, "") for figures in ((1.0,), (1.0, 1.1, 0.95), (), (0.0, 5.0))),
    ],
)
def test_a_slow_device_is_named_with_its_node_and_by_how_much(name: str, figures: tuple[float, ...], line: str) -> None:
    found = slow_devices([{"device": number, name: figure} for number, figure in enumerate(figures)], 4)
    assert [each.startswith(line) for each in found] == [True] * bool(line)
