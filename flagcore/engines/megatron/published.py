"""The settings that a job record of a published run omits: the record takes precedence, then its notes, then defaults.

docs/job-records.md lists the defaults; other settings have the defaults of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import SettingValue, Task
from flagcore.engines.megatron.production import IMPLEMENTATION, overlaps
from flagcore.engines.megatron.settings import SETTINGS
from flagcore.engines.megatron.stages import LAYOUT, parse_layout, published_split
from flagcore.spec.knobs import setting_from_text

PIPELINE, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
SPLITS = (
    LAYOUT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def published(
    task: Task, values: Mapping[str, KnobValue], notes: str
) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
    """Return the completed task and knobs of a job record, and the names of settings found only in its notes.

    Raises SpecError for an invalid layout of stages.
    """
    adapters = re.search(r"\b(lora|peft)\b", task.spec.model.name, re.IGNORECASE)  # nothing else identifies them
    noted = read_notes(f"{notes}; {adapters[0] if adapters else ''}")
    train, values = task.spec.train, dict(values)
    if "pipeline_schedule" in noted:  # papers on schedules (arXiv 2104.04473, 2401.10241), whose memory confirms it
        train = replace(train, attention="unfused")
        noted = {"overlap_p2p_comm": False, **noted}
        task = replace(task, spec=replace(task.spec, work=train))
    kind = train.implementation or IMPLEMENTATION
    settings = {**noted, **train.settings}
    settings = _defaults(task, kind, settings, values) | settings
    stages = int(values.get(PIPELINE) or 1)
    layout = settings.get(LAYOUT)
    if layout:
        layout_stages = parse_layout(str(layout), task.spec.model.num_layers, task.spec.model.mtp_num_layers)
        if not values.get(VIRTUAL) and len(layout_stages) % stages == 0:
            values[VIRTUAL] = len(layout_stages) // stages
    elif not any(settings.get(key) or values.get(key) for key in SPLITS):
        settings |= published_split(task.spec.model, stages * int(values.get(VIRTUAL) or 1))
    spec = replace(task.spec, work=replace(train, implementation=kind, settings=settings))
    return replace(task, spec=spec), values, frozenset(noted.keys() - train.settings.keys())


def _defaults(
    task: Task, kind: str, settings: Mapping[str, SettingValue], values: Mapping[str, KnobValue]
) -> dict[str, SettingValue]:
    flash, sharded = task.spec.train.attention == "flash", bool(values.get("use_distributed_optimizer"))
    split = bool(values.get("sequence_parallel")) and int(values.get("tensor_model_parallel_size") or 1) > 1
    return {
        **overlaps(task, kind, settings, sharded=sharded, sequence_parallel=split),
        "moe_token_dispatcher_type": "alltoall",
        "cp_comm_type": "p2p",
        "attention_dropout": 0.0 if flash else 0.1,  # Megatron-LM's default, as when models had dropout
        "hidden_dropout": 0.0 if flash else 0.1,
    }


_PAIR_PATTERN = re.compile(
    r"(?<![\w-])-{0,2}([a-z][\w-]*)\s*=\s*(\[[^\]]*\]|[^\s;,]+(?:,\w+(?![\w-]*\s*=))*)", re.IGNORECASE
)
_LAYOUT_PATTERN = re.compile(r"(?<![\w-])(\w*layout)\s*=\s*([^\s;]+)", re.IGNORECASE)
_NEGATION_PATTERN = r"(?:no|non|not|without|disabled?)[- _]+"
_OFF_PATTERN = r"[- _]*(?:off|disabled)\b"


@lru_cache(maxsize=4096)
def read_notes(notes: str) -> Mapping[str, SettingValue]:
    """Return the settings in `notes`. `name = value` takes precedence over phrases, and the first mention counts."""
    settings: dict[str, SettingValue] = {}
    remaining = notes[:10_000]
    for pattern in (_LAYOUT_PATTERN, _PAIR_PATTERN):
        for pair in pattern.finditer(remaining):
            _add_missing(settings, _parse_pair(pair[1], pair[2]))
        remaining = pattern.sub(";", remaining)
    remaining = remaining.lower()
    for flag in _switch_patterns():
        if match := flag.search(remaining):
            off = bool(match["no"] or match["off"])
            name, value = _setting_name(match["name"]), "false" if off else "true"
            _add_missing(settings, setting_from_text(name, value, SETTINGS))
            remaining = remaining[: match.start()] + ";" + remaining[match.end() :]
    for phrase, phrase_settings in _tables()["phrases"].items():
        if (match := re.search(phrase, remaining)) and not re.search(
            _NEGATION_PATTERN + "$", remaining[: match.start()]
        ):
            _add_missing(settings, _settings_of_phrase(phrase_settings, match))
    implied = {other: True for key, other in _tables()["implied"].items() if settings.get(key, False) is not False}
    _add_missing(settings, implied)
    return settings


@cache
def _tables() -> dict[str, Any]:
    text = files(__package__).joinpath("notes.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _switch_patterns() -> list[re.Pattern[str]]:
    """Return patterns that match the names of switches, the longest names first."""
    switches = [knob.name for knob in SETTINGS if knob.kind == "flag"]
    aliases = [name for name, key in _tables()["names"].items() if key in switches]
    return [
        re.compile(
            rf"(?<![\w-])(?:--)?(?P<no>{_NEGATION_PATTERN})?"
            rf"(?P<name>{name.replace('_', '[- _]')})(?![\w=])(?P<off>{_OFF_PATTERN})?"
        )
        for name in sorted((*switches, *aliases), key=len, reverse=True)
    ]


def _add_missing(settings: dict[str, SettingValue], new: Mapping[str, SettingValue]) -> None:
    settings.update({key: value for key, value in new.items() if key not in settings})


def _parse_pair(name: str, text: str) -> Mapping[str, SettingValue]:
    key, value = _setting_name(name), re.sub(r"""[\[\]'"()]""", "", text).strip()
    if key == LAYOUT:
        return {LAYOUT: text}
    implied: Mapping[str, SettingValue] | None = _tables()["values"].get(key, {}).get(value.lower())
    if implied is not None:
        return implied
    if key == "use_megatron_fsdp" and value.isdecimal():
        return {key: int(value) > 1}
    return setting_from_text(key, value, SETTINGS) or setting_from_text(key, value.lower(), SETTINGS)


def _settings_of_phrase(phrase_settings: Mapping[str, SettingValue], match: re.Match[str]) -> dict[str, SettingValue]:
    """Return the settings of a phrase. `{1}` is the text of the match's first group; an invalid value is skipped."""
    settings: dict[str, SettingValue] = {}
    for key, value in phrase_settings.items():
        if value != "{1}":
            settings[key] = value
        elif match[1]:
            settings |= setting_from_text(key, re.sub(r" *[+,] *", ",", match[1]), SETTINGS)
    return settings


def _setting_name(name: str) -> str:
    plain = re.sub(r"[- ]+", "_", name.strip("-").lower())
    return str(_tables()["names"].get(plain, plain))
