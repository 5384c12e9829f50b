"""Draws deterministic SVG scatter plots of predicted over measured values on logarithmic axes."""

import math
from collections.abc import Sequence
from html import escape

SIZE, MARGIN, TITLE = 300, 44, 18
TICKS = (1, 2, 5)
COLUMNS = 3
ERROR_FACTOR = 1.25
"""Error factor of the dashed lines."""

Point = tuple[float, float, bool]
"""Measured, predicted, and whether the measurement is inside the predicted interval (True without an interval)."""


def scatter(title: str, unit: str, points: Sequence[Point]) -> str:
    """Return a scatter plot; points inside their predicted interval are blue, others orange."""
    values = [value for measured, predicted, _ in points for value in (measured, predicted)]
    lower, upper = math.log(min(values) / 1.3), math.log(max(values) * 1.3)

    def x(value: float) -> float:
        return round(MARGIN + (math.log(value) - lower) / (upper - lower) * (SIZE - MARGIN - 8), 1)

    def y(value: float) -> float:
        return round(SIZE - x(value), 1)

    def line(factor: float, style: str) -> str:
        start, end = math.exp(lower) * max(1.0, 1.0 / factor), math.exp(upper) / max(1.0, factor)
        return f'<path d="M{x(start)} {y(start * factor)}L{x(end)} {y(end * factor)}" stroke="#888" {style}/>'

    def dots(is_inside: bool, colour: str) -> str:
        path = "".join(
            f"M{x(measured)} {y(predicted)}h0" for measured, predicted, stored in points if stored is is_inside
        )
        return f'<path d="{path}" stroke="{colour}" stroke-width="4" stroke-linecap="round" opacity=".6"/>'

    caption = (
        f"{len(points)} runs, predicted over measured {unit} on logarithmic axes; dashed: {ERROR_FACTOR} times off"
    )
    height = SIZE + TITLE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-TITLE} {SIZE} {height}" width="{SIZE}"',
        f' height="{height}" font-family="sans-serif" font-size="10">',
        f"<title>{escape(title)}</title><desc>{escape(caption)}</desc>",
        f'<rect y="{-TITLE}" width="{SIZE}" height="{height}" fill="#fff"/>',
        f'<text x="{SIZE / 2}" y="-5" text-anchor="middle">{escape(title)}</text>',
        f'<path d="M{MARGIN} 8V{SIZE - MARGIN}H{SIZE - 8}" stroke="#333" fill="none"/>',
        *(_tick(value, x(value), y(value)) for value in _ticks(lower, upper)),
        line(1.0, ""),
        line(ERROR_FACTOR, 'stroke-dasharray="3"'),
        line(1.0 / ERROR_FACTOR, 'stroke-dasharray="3"'),
        dots(True, "#1f77b4"),
        dots(False, "#d95f02"),
        f'<text x="{SIZE / 2}" y="{SIZE - 8}" text-anchor="middle">measured {escape(unit)}</text>',
        f'<text transform="translate(11 {SIZE / 2}) rotate(-90)" text-anchor="middle">predicted {escape(unit)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def grid(plots: Sequence[str]) -> str:
    """Return plots as one picture, COLUMNS of them in a row."""
    height = SIZE + TITLE
    inner = "".join(
        plot.replace("<svg ", f'<svg x="{place % COLUMNS * SIZE}" y="{place // COLUMNS * height}" ', 1)
        for place, plot in enumerate(plots)
    )
    whole = (COLUMNS * SIZE, -(-len(plots) // COLUMNS) * height)
    view = f'viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" height="{whole[1]}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n{inner}</svg>\n'


def _ticks(lower: float, upper: float) -> list[float]:
    """Return the ticks of an axis: 1, 2 and 5 of each power of ten, or only powers of ten on a long axis."""
    powers = range(math.floor(lower / math.log(10)), math.ceil(upper / math.log(10)) + 1)
    ticks = TICKS if len(powers) < 5 else (1,)
    values = [lead * 10.0**power for power in powers for lead in ticks]
    return [value for value in values if lower < math.log(value) < upper]


def _tick(value: float, x: float, y: float) -> str:
    bottom = SIZE - MARGIN
    return (
        f'<path d="M{x} {bottom}v4M{MARGIN} {y}h-4" stroke="#333"/>'
        f'<text x="{x}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
        f'<text x="{MARGIN - 6}" y="{y + 3}" text-anchor="end">{value:g}</text>'
    )
