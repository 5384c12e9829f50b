"""Prints docs/portability.md with a current table of one spec on six chips.

Needs no hardware. `python examples/portability.py --write` updates the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flagcore import api
from flagcore.report.text import values_text

SPEC = Path(__file__).with_name("portability.yaml")
PAGE = Path(__file__).parents[1] / "docs" / "portability.md"
MARKS = ("<!-- examples/portability.py -->\n", "<!-- end -->\n")
CHIPS = ("A800-80GB", "C500", "C550", "BI-V150", "MLU370-X8", "H100-SXM")


def winners() -> dict[str, api.Estimate]:
    """Return the estimate for each chip with the fastest candidate only."""
    return {chip: api.estimate(SPEC, chip=chip, top=1) for chip in CHIPS}


def short_name(found: api.Estimate) -> str:
    """Return the short name of the winner without the data parallel size, which follows from the number of devices."""
    values = dict(found.candidates[0]["candidate"])
    del values["data_parallel_size"], values["use_distributed_optimizer"]
    return values_text(values, found.knobs)


def table(*rows: list[str]) -> list[str]:
    """Return rows as a table; the first row is the heading."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "| --- " * len(rows[0]) + "|", *others, ""]


def of_winners(found: dict[str, api.Estimate]) -> list[str]:
    """Return the table of the fastest candidate on each chip."""
    rows = [["chip", "devices", "fastest", "~step", "~tokens/s/device", "~MFU", "~memory", "limited by"]]
    for chip, estimate in found.items():
        best = estimate.candidates[0]
        memory, rate = best["memory"], best["tokens_per_second_per_device"]["value"]
        used = f"{memory['device_used_gib']:.1f} of {memory['capacity_gib']:.1f} GiB"
        step = f"{best['step_time_s']['value']:.1f} s"
        rows.append(
            [
                chip,
                str(estimate.devices),
                short_name(estimate),
                step,
                f"{rate:,.0f}",
                f"{best['mfu']:.0%}",
                used,
                best["limit"],
            ]
        )
    return table(*rows)


def page(text: str) -> str:
    """Return `text` with a new table between the marks."""
    before, _, rest = text.partition(MARKS[0])
    return "\n".join([f"{before}{MARKS[0]}", *of_winners(winners()), MARKS[1]]) + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    now = page(PAGE.read_text("utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(now, "utf-8")
    else:
        print(now)
