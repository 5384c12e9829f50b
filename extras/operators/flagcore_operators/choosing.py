"""Chooses the implementation of each operator from the times of its calls.

What vendors' plugins say against implementations is in their files `operators.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flagcore_vendorkit.fields import build, read_file

from flagcore.domain.chip import Source

GAIN = 0.02
"""The share by which another implementation must be faster than the default: less is noise, and a default is tested
more often."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The choice for one operator. Times are seconds of all its calls in the recorded run.

    `excluded`: the reason for each implementation that cannot be used. `chosen` is `default` if nothing was measured.
    """

    operator: str
    calls: int
    default: str
    chosen: str
    default_s: float | None
    chosen_s: float | None
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def gain_s(self) -> float:
        """The seconds that the choice saves."""
        return 0.0 if self.default_s is None or self.chosen_s is None else self.default_s - self.chosen_s


def choose(
    calls: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    in_effect: Mapping[str, str],
    avoided: Mapping[str, Mapping[str, str]],
) -> list[Chosen]:
    """Return the fastest right implementation of each operator, those with the largest gain first.

    `calls`: as the recorder saves them. `rows`: results of the benchmark: `call` (a place in `calls`),
    `implementation`, and `seconds`, `wrong` or `failed`. Calls that were not timed count as the timed ones of their
    operator, by their sizes. `in_effect`: see `OperatorLibrary.in_effect`. `avoided`: reasons against implementations,
    by operator.
    """
    found = []
    for operator in dict.fromkeys(call["operator"] for call in calls):
        own = {place: call for place, call in enumerate(calls) if call["operator"] == operator}
        implementations = next(iter(own.values()))["implementations"]
        set_by_user = in_effect.get(operator, in_effect.get("*", ""))
        default = set_by_user if set_by_user in implementations else implementations[0]
        results = [row for row in rows if row["call"] in own]
        excluded = _excluded(results, avoided.get(operator, {}))
        times = _times(own, results, implementations)
        right = {each: value for each, value in times.items() if each not in excluded}
        chosen = min(right, key=lambda each: right[each], default=default)
        if default in right and right[chosen] > (1.0 - GAIN) * right[default]:
            chosen = default
        found.append(
            Chosen(
                operator=operator,
                calls=sum(call["count"] for call in own.values()),
                default=default,
                chosen=chosen,
                default_s=times.get(default),
                chosen_s=times.get(chosen),
                excluded=excluded,
            )
        )
    return sorted(found, key=lambda each: -each.gain_s)


def _excluded(results: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> dict[str, str]:
    excluded = dict(reasons)
    for row in results:
        if "seconds" not in row:
            why = f"wrong result: it {row['wrong']}" if row.get("wrong") else str(row["failed"])
            excluded.setdefault(row["implementation"], why)
    return excluded


def _times(
    calls: Mapping[int, Mapping[str, Any]], results: Sequence[Mapping[str, Any]], implementations: Sequence[str]
) -> dict[str, float]:
    """Return the seconds of all calls of an operator with each implementation that has a time of every timed call."""
    timed = {row["call"] for row in results}
    work = {place: call["count"] * max(call["size"], 1.0) for place, call in calls.items()}
    scale = sum(work.values()) / (sum(work[place] for place in timed) or 1.0)
    times = {}
    for each in implementations:
        seconds = {row["call"]: row.get("seconds") for row in results if row["implementation"] == each}
        if timed and seconds.keys() == timed and None not in seconds.values():
            times[each] = scale * sum(calls[place]["count"] * value for place, value in seconds.items())
    return times


def avoided(package: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return a vendor's reasons against implementations, by operator, from `operators.yaml` of its plugin's package.

    `names`: the libraries whose entries apply. Raises SpecError if the file is not valid.
    """
    content, found = read_file(package, "operators.yaml") or {}, dict[str, dict[str, str]]()
    for entry in build(tuple[Avoided, ...], content.get("avoid") or [], f"{package}/operators.yaml", "avoid"):
        for operator in entry.operators if entry.name in names else ():
            found.setdefault(operator, {})[entry.implementation] = f"{entry.why} ({entry.source.detail})"
    return found


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An implementation that a vendor, or users of its chips, found wrong, broken or slow for some operators.

    `name`: that of the library.
    """

    name: str
    implementation: str
    operators: tuple[str, ...]
    why: str
    source: Source
