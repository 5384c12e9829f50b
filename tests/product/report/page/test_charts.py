"""The geometry of charts."""

import pytest

from flagcore.report.page.blocks import BEST, OTHER, Bar, Bars, Plot, Series, linear, spread


@pytest.mark.parametrize(
    ("values", "from_zero", "ticks"),
    [
        ([3.0, 9.5], True, [0.0, 5.0, 10.0]),
        ([101.0, 399.0], False, [100.0, 200.0, 300.0, 400.0]),
        ([0.0001, 0.00035], False, [0.0001, 0.0002, 0.0003, 0.0004]),
        ([5.0], False, [4.5, 5.0, 5.5]),
        ([0.0, 0.0], True, [-0.1, -0.05, 0.0, 0.05, 0.1]),
    ],
)
def test_a_linear_axis_has_round_ticks_around_its_values(
    values: list[float], from_zero: bool, ticks: list[float]
) -> None:
    axis = linear("", values, from_zero=from_zero)
    assert axis.ticks == pytest.approx(ticks)
    assert (axis.place(axis.low), axis.place(axis.high)) == (0.0, 100.0)
    assert all(0.0 <= axis.place(each) <= 100.0 for each in values)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([0.03, 0.4], [0.02, 0.05, 0.1, 0.2, 0.5]), ([0.02, 100.0], [0.1, 1.0, 10.0, 100.0]), ([1e-9, 1e6], None)],
)
def test_a_wide_axis_is_logarithmic(values: list[float], ticks: list[float] | None) -> None:
    axis = spread("", values)
    assert axis.is_log
    assert len(axis.ticks) <= 6
    assert ticks is None or axis.ticks == pytest.approx(ticks)
    assert all(0.0 <= axis.place(each) <= 100.0 for each in [*values, *axis.ticks])
    assert axis.place((axis.low * axis.high) ** 0.5) == pytest.approx(50.0)


@pytest.mark.parametrize("values", [[1.0, 7.0], [0.0, 100.0], [-1.0, 100.0]])
def test_other_axes_are_linear(values: list[float]) -> None:
    assert not spread("", values).is_log


def test_points_and_steps_are_placed_from_the_top_left() -> None:
    axis = linear("", [0.0, 10.0])
    series = Series(name="", points=[(0.0, 0.0, ""), (5.0, 10.0, "")], style=0, stepped=True)
    plot = Plot(x=axis, y=axis, series=[series])
    assert plot.at(2.0, 4.0) == (20.0, 60.0)
    assert plot.steps(series) == "M0.0 100.0H50.0V0.0"


def test_bars_share_the_width_of_the_largest_value() -> None:
    bars = Bars("", [Bar("", BEST, 5.0, 4.0, 10.0), Bar("", OTHER, 2.0, 2.0, 2.0)])
    assert [bars.share(each.value) for each in bars.bars] == [50.0, 20.0]
    assert Bars("", [Bar("", BEST, 0.0, 0.0, 0.0)]).share(0.0) == 0.0


def test_a_value_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        linear("", [0.0, 1.0]).place(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        Bars("", [Bar("", BEST, 1.0, 1.0, 1.0)]).share(float("inf"))
