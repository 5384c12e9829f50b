"""One knob: which values it takes, what they become, and how a launch command spells them."""

from typing import Any

import pytest

from flagcore.domain.knob import Effect, Flag, Knob
from flagcore.errors import SpecError
from tests import tasks

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
    with pytest.raises(SpecError) as error:
        knob.parse(given, "auto_tuner.space.x")
    assert error.value.key == "auto_tuner.space.x"
    assert error.value.value == given
    assert error.value.fix


def test_flags_follow_the_release_of_the_engine() -> None:
    flags = (Flag(name="new-size", versions=">=0.12"), Flag(name="size"))
    knob = Knob(name="size", flags=flags)
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
