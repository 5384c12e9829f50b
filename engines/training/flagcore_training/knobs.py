"""The tables of knobs and of legality rules of training engines, and the effects of settings that predictions omit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from math import gcd
from typing import Any

import yaml

from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import Flag, Knob, Requirement
from flagcore.domain.space import BoolArray, Columns, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import Message
from flagcore.spec.plain_data import Notes, SafeLoader, package_yaml

AUTOS: Mapping[str, Callable[[Task], Sequence[KnobValue]]] = {
    "divisors": lambda task: divisors(task.cluster.devices),
    "linked_divisors": lambda task: [n for n in divisors(task.cluster.devices) if n <= task.cluster.linked_devices],
    "batch_divisors": lambda task: divisors(task.spec.train.global_batch_size),
    "expert_divisors": lambda task: divisors(gcd(task.spec.model.experts or 1, task.cluster.devices)),
    "virtual_stages": lambda task: (None, *_virtual_stage_lengths(task.spec.model.num_layers)),
    "layers": lambda task: _layer_numbers(task.spec.model.num_layers),
}
"""Functions that return the values of `auto`, by their name in `knobs.yaml`."""


def read_knobs(package: str, **defaults: object) -> tuple[Knob, ...]:
    """Return the knobs in the file `knobs.yaml` of a package. `defaults`: keys of all rows that lack them."""
    rows = yaml.load(files(package).joinpath("knobs.yaml").read_text("utf-8"), SafeLoader)
    return tuple(knob_of_row(name, {**defaults, **row}) for name, row in rows.items())


def knob_of_row(name: str, row: dict[str, Any]) -> Knob:
    """Return the knob for a row of a table. The keys of a row are fields of Knob, or these:

    - `flag`: its flag, by default its name with hyphens; an empty text means that it has none.
    - `since`: the first release with the flag, if that differs from `versions`.
    - `others`: alternative flags, as the fields of Flag.
    - `compare`: a space may list values of this setting. Then a switch is off by default.
    - `auto`: a key of AUTOS, or the values besides the engine's default. By default these are all words, or both values
      of a switch, if a space may contain the knob.
    The default kind is a switch, the default scope a setting.
    """
    kind, words = row.pop("kind", "flag"), tuple(row.pop("words", ()))
    spelled, since = row.pop("flag", name.replace("_", "-")), row.pop("since", "")
    versions = f">={since}" if since else row.get("versions", "")
    flags = [Flag(name=spelled, versions=versions)] if spelled else []
    flags += [Flag(**each) for each in row.pop("others", ())]
    scope = (*row.pop("scope", ("setting",)), *(("space",) if row.pop("compare", False) else ()))
    requires = tuple(Requirement(knob=each["knob"], one_of=tuple(each["one_of"])) for each in row.pop("requires", ()))
    auto = row.pop("auto", words if "space" in scope and kind == "word" else ())
    values = auto if isinstance(auto, str) or "setting" not in scope else (None, *auto)
    if "space" in scope and kind == "flag":
        row["neutral"], values = row.get("neutral", False), auto or (False, True)
    if isinstance(values, str):
        row["auto"] = AUTOS[values]
    elif values not in ((), (None,)):
        row["auto"] = lambda task: values
    return Knob(name=name, kind=kind, scope=scope, flags=tuple(flags), words=words, requires=requires, **row)


def _layer_numbers(layers: int) -> tuple[int, ...]:
    """Return the numbers of layers up to `layers`: each one up to 128, then every 16th, so that spaces stay small."""
    return (*range(1, min(layers, 128) + 1), *range(144, layers + 1, 16))


def _virtual_stage_lengths(layers: int) -> list[int]:
    return sorted({*divisors(layers), *divisors(-(-layers // 4) * 4)})


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def joined(effects: Iterable[Unmodelled]) -> list[Unmodelled]:
    """Return effects of which those that are the same are one, with all names."""
    names: dict[Unmodelled, list[str]] = {}
    for each in effects:
        names.setdefault(replace(each, name=""), []).append(each.name)
    return [replace(effect, name=", ".join(of_effect)) for effect, of_effect in names.items()]


def note_effects(effects: Iterable[Unmodelled], notes: Notes) -> None:
    """Add an import note on each effect."""
    for each in effects:
        notes.note(each.name, f"is passed to the engine, but not predicted: {each.why}", "train")


class RuleTable:
    """The rules in the file `rules.yaml` of a package: `knobs`, and the `message` with fields for their names.

    `names`: the names of knobs by their fields, such as `TP`.
    """

    def __init__(self, package: str, names: Mapping[str, str]) -> None:
        self.rows: Mapping[str, Mapping[str, str]] = package_yaml(package, "rules.yaml")
        self.names = names

    def __call__(
        self, name: str, broken: Callable[[Columns], BoolArray], /, message: str = "", **values: object
    ) -> Rule:
        """Return the rule of a row.

        `broken`: as in Rule. `message`: replaces that of the row. `values`: those of the other fields of the message.
        """
        row = self.rows[name]
        knobs = tuple(self.names[field] for field in row["knobs"].split())
        text = Message(message or row["message"], **self.names, **values)
        return Rule(name=name, knobs=knobs, message=text, broken=broken)
