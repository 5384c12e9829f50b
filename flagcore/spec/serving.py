"""Converts the serving sections of a validated spec to `flagcore.domain.serving`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagcore.domain.serving import CLIENT_LOG, DEFAULT_CONCURRENCY, IMAGE_SIZE, MIN_REQUESTS, Images, Load, ServeSpec
from flagcore.domain.spec import AUTO
from flagcore.spec.huggingface import format_of_weights
from flagcore.spec.plain_data import spec_error
from flagcore.spec.serve_schema import ImagesSection, ProfileSection, ServeSection, SloSection

MAX_RATE = 1e5
"""The upper bound of the search for a request rate, in requests per second."""
DEFAULT_REQUESTS = 128
"""Default number of requests of a load without a steady state."""


def serve_of(
    section: ServeSection, engine: str, base: Path, *, cards: int | None, model: object, default_space: bool, file: str
) -> ServeSpec:
    """Return the serving job of a section for one of its engines. Raises SpecError."""
    weights = section.weights or (model if isinstance(model, str) else None)
    directory = (base / (section.directory or ".")).resolve()
    highest, slo = _highest(section, file), slo_of(section.slo)
    check_answers(section.profile, slo, file)
    return ServeSpec(
        engine=engine,
        loads=_loads(section.profile, slo, base, file),
        precision=section.precision or (_stored_format(base / weights) if weights else None) or "bf16",
        engine_args=dict(section.engine_args),
        slo=slo,
        repeats=section.repeats,
        highest=highest,
        prefix_aware=_is_prefix_aware(section),
        default_space=default_space,
        **_client(section, file),
        weights=str((base / weights).resolve()) if weights else None,
        command=tuple(section.command) if section.command else None,
        directory=str(directory) if section.command else None,
        cards=cards,
        engine_version=section.engine_version,
    )


def check_answers(profile: ProfileSection, figures: Iterable[str], file: str) -> None:
    """Raise SpecError if answers of one token lack one of the figures."""
    if profile.output_len > 1 or profile.trace is not None:
        return
    if name := next((each for each in figures if each.startswith(("tpot_s", "itl_s"))), None):
        problem, fix = f"has no {name}: that is the time of further tokens", "use 2 or more, or another figure"
        raise spec_error("serve.profile.output_len", problem, value=profile.output_len, fix=fix, file=file)


def _is_prefix_aware(section: ServeSection) -> bool:
    shares_prefixes = section.profile.trace is not None or section.profile.turns > 1
    return section.router == "prefix_aware" or (section.router == AUTO and shares_prefixes)


def _stored_format(weights: Path) -> str | None:
    path = weights / "config.json" if weights.is_dir() else weights
    with suppress(OSError, ValueError):
        config = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else None
        return format_of_weights(config) if isinstance(config, Mapping) else None
    return None


def _client(section: ServeSection, file: str) -> dict[str, Any]:
    if section.client is None:
        return {}
    load_points = section.profile.concurrency, section.profile.request_rate
    if any(isinstance(each, list) and len(each) > 1 for each in load_points):
        problem, fix = "sends one load point, but serve.profile has several", "give one number in serve.profile"
        raise spec_error("serve.client", problem, fix=fix, file=file)
    if "/" in section.client.report or section.client.report in (".", "..", CLIENT_LOG):
        problem = f"must be the name of a file, not a path or {CLIENT_LOG}"
        fix = "give the name of a file; the client runs in its own folder"
        raise spec_error("serve.client.report", problem, value=section.client.report, fix=fix, file=file)
    return {"client": tuple(section.client.command), "report": section.client.report}


def slo_of(section: SloSection) -> dict[str, float]:
    """Return the upper bounds by the names of their figures, such as `ttft_s.p99`."""
    return {
        f"{latency}.{statistic}": limit
        for latency, bounds in section.model_dump().items()
        for statistic, limit in bounds.items()
        if limit is not None
    }


def engines_of(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the serving engines in a spec's data, without duplicates; empty for a training spec."""
    serve = data.get("serve")
    engine = serve.get("engine") if isinstance(serve, Mapping) else None
    names = engine if isinstance(engine, list) else [engine]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def select_engine(data: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return a spec's data with only one of its engines. Raises SpecError for knobs of an engine that is not named."""
    tuner = dict(data.get("auto_tuner") or {})
    for key in ("space", "baseline"):
        if isinstance(tuner.get(key), Mapping):
            check_sections(tuner[key], engines_of(data), key)
            tuner[key] = knobs_of_engine(tuner[key], engine)
    selected = {**data, "serve": {**data["serve"], "engine": engine}}
    return {**selected, "auto_tuner": tuner} if tuner else selected


def check_sections(knobs: Mapping[str, Any], engines: Sequence[str], key: str) -> None:
    """Raise SpecError for a section with knobs of an engine that is not in `engines`."""
    for name, value in knobs.items():
        if isinstance(value, Mapping) and name not in engines:
            problem = "has knobs of an engine that serve.engine does not name"
            fix = f"remove it, or add the engine to serve.engine ({', '.join(engines)})"
            raise spec_error(("auto_tuner", key, name), problem, fix=fix)


def knobs_of_engine(space: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return the knobs of an engine. Its section overrides the knobs for all engines."""
    common = {key: value for key, value in space.items() if not isinstance(value, Mapping) and key != engine}
    return {**common, **(space.get(engine) or {})}


def _highest(section: ServeSection, file: str) -> str | None:
    """Return the key of the profile that is searched. Raises SpecError if there is no limit or another generator."""
    keys = [key for key in ("concurrency", "request_rate") if getattr(section.profile, key) == AUTO]
    if not keys:
        return None
    key = f"serve.profile.{keys[0]}"
    if not slo_of(section.slo):
        problem, fix = "needs limits that the highest load keeps", "set serve.slo"
        raise spec_error(key, problem, value=AUTO, fix=fix, file=file)
    other = "serve.client" if section.client is not None else "serve.profile.trace"
    if section.client is not None or section.profile.trace is not None:
        raise spec_error(key, f"cannot be combined with {other}", value=AUTO, fix="give one of the two", file=file)
    return keys[0]


def _loads(profile: ProfileSection, slo: Mapping[str, float], base: Path, file: str) -> tuple[Load, ...]:
    if profile.concurrency is not None and profile.request_rate is not None:
        problem, fix = "cannot be combined with serve.profile.request_rate", "remove one of the two"
        raise spec_error("serve.profile.concurrency", problem, value=profile.concurrency, fix=fix, file=file)
    if profile.range_spread is not None and profile.range_ratio != 1.0:
        problem, fix = "cannot be combined with serve.profile.range_ratio", "remove one of the two"
        raise spec_error("serve.profile.range_spread", problem, value=profile.range_spread, fix=fix, file=file)
    if profile.distribution != "uniform" and (profile.range_spread is not None or profile.range_ratio != 1.0):
        problem, fix = "cannot be combined with serve.profile.range_ratio or range_spread", "remove one of the two"
        raise spec_error("serve.profile.distribution", problem, value=profile.distribution, fix=fix, file=file)
    fields = profile.model_dump(exclude={"concurrency", "request_rate", "trace", "images"})
    fields["num_prompts"] = number = _num_prompts(profile, slo)
    fields["is_steady"] = number is None
    if profile.images is not None:
        fields["images"] = _images(profile.images, profile, file)
    if profile.trace is not None:
        fields["trace"] = str((base / profile.trace).resolve())
    if profile.request_rate == AUTO:
        return (Load(**fields, request_rate=MAX_RATE),)
    if profile.concurrency == AUTO:
        return (Load(**fields, concurrency=number),)
    rates = _as_list(profile.request_rate)
    if rates:
        return tuple(Load(**fields, request_rate=math.inf if rate == "inf" else float(rate)) for rate in rates)
    if profile.trace is not None and profile.concurrency is None:
        return (Load(**fields),)  # the trace may have arrival times
    clients = _as_list(profile.concurrency) or [min(DEFAULT_CONCURRENCY, number or DEFAULT_CONCURRENCY)]
    return tuple(Load(**fields, concurrency=each) for each in clients)


def _num_prompts(profile: ProfileSection, slo: Mapping[str, float]) -> int | None:
    """Return the number of requests; None for loads that can be measured in their steady state.

    Traces, conversations, bursts and searches for the highest load need a number: by default as many as the percentiles
    of the limits need.
    """
    if profile.num_prompts != AUTO:
        return int(profile.num_prompts)
    has_end = profile.trace is not None or profile.turns > 1 or "inf" in _as_list(profile.request_rate)
    if has_end or AUTO in (profile.request_rate, profile.concurrency):
        return max([DEFAULT_REQUESTS, *(MIN_REQUESTS.get(name.rpartition(".")[2], 0) for name in slo)])
    return None


def _images(section: ImagesSection, profile: ProfileSection, file: str) -> Images:
    """Return the images of a load. Raises SpecError for a wrong size, and for loads that cannot have images."""
    other = "trace" if profile.trace is not None else "turns" if profile.turns > 1 else ""
    if other:
        fix = "put the images into the trace" if other == "trace" else "remove one of the two"
        problem = f"cannot be combined with serve.profile.{other}"
        raise spec_error("serve.profile.images", problem, fix=fix, file=file)
    sizes, total = dict[str, re.Match[str]](), sum(section.bucket_config.values())
    for text in section.bucket_config:
        size = re.match(IMAGE_SIZE, text)
        if size is None:
            key, problem = ("serve", "profile", "images", "bucket_config", text), "is not a size in pixels"
            raise spec_error(key, problem, fix="write WIDTHxHEIGHT up to 9999, such as 1280x720", file=file)
        sizes[text] = size
    return Images(
        buckets=tuple(
            (int(sizes[text][1]), int(sizes[text][2]), share / total) for text, share in section.bucket_config.items()
        ),
        **section.model_dump(exclude={"bucket_config"}),
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
