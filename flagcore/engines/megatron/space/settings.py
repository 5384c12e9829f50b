"""The settings of Megatron training: knobs that have one value for all candidates of a run."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.knob import Flag, Knob, Requirement
from flagcore.domain.spec import SettingValue

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _setting(name: str, row: dict[str, Any]) -> Knob:
    """Return the setting of a row of `settings.yaml`, whose keys are fields of Knob, or one of these:

    - `flag`: its flag, by default its name with hyphens; an empty text means that it has none.
    - `since`: the first release with the flag. `others`: alternative flags, as the fields of Flag.
    - `compare`: a space may list values. Then a switch is off by default.
    - `auto`: the values besides the engine's default, by default all words, or both values of a switch.
    """
    kind, compare = row.pop("kind", "flag"), row.pop("compare", False)
    spelled, since = row.pop("flag", name.replace("_", "-")), row.pop("since", "")
    flags = [Flag(name=spelled, versions=f">={since}" if since else "")] if spelled else []
    flags += [Flag(**each) for each in row.pop("others", ())]
    scope = (*row.pop("scope", ("setting",)), *(("space",) if compare else ()))
    requires = tuple(Requirement(knob=each["knob"], one_of=tuple(each["one_of"])) for each in row.pop("requires", ()))
    words = tuple(row.pop("words", ()))
    values = (None, *row.pop("auto", words if compare and kind == "word" else ()))
    if compare and kind == "flag":
        row["neutral"], values = row.get("neutral", False), (False, True)
    auto: dict[str, Any] = {"auto": lambda task: values} if len(values) > 1 else {}
    return Knob(name=name, kind=kind, scope=scope, flags=tuple(flags), words=words, requires=requires, **auto, **row)


SETTINGS = tuple(
    _setting(name, row)
    for name, row in yaml.load(files(__package__).joinpath("settings.yaml").read_text("utf-8"), LOADER).items()
)


def recompute_modules(settings: Mapping[str, SettingValue]) -> frozenset[str]:
    """Return the modules that selective recompute recomputes."""
    return words(settings.get("recompute_modules") or "core_attn")


def words(text: SettingValue) -> frozenset[str]:
    """Return the words in a comma-separated list."""
    return frozenset(str(text).split(",")) if text else frozenset()
