"""A tree for serving: a list under `serve`, and a space for each engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagcore.errors import SpecError, join_errors
from flagcore.importers.flagscale import arguments, layouts
from flagcore.importers.flagscale.engines import (
    DEFAULT_ENGINES,
    ENGINES,
    KNOB_NAMES,
    KNOBS,
    OWN_SPACE,
    TABLES,
    flagscale_name,
)
from flagcore.importers.flagscale.experiment import cluster, control
from flagcore.importers.flagscale.source import Source, flag_name, leaves

_TUNER, _PERFORMANCE = "experiment.auto_tuner", "experiment.auto_tuner.performance"
_OBJECTIVES: dict[str, str] = TABLES["objectives"]
_PROFILE: dict[str, Any] = TABLES["own_profile"]
_UNSUPPORTED_BLOCK = 8
_DISAGGREGATION = ("kv_transfer_config", "disaggregation_mode")
"""Arguments of servers that only prefill or only decode."""


def serving(source: Source) -> dict[str, Any]:
    """Return the data of a spec that serves. Raises SpecError where something that it needs is missing."""
    source.drop("experiment.task.entrypoint", "each trial starts the engine's own server", "serve")
    source.drop("experiment.task.backend", "the engine is that of the model, or auto_tuner.engines", "serve.engine")
    item = _item(source)
    _check_not_disaggregated(source, item)
    engines = _engines(source, item)
    layouts.normalize_specific_arguments(source, item, [flagscale_name(each) for each in engines])
    model = _model(source, item, engines)
    given = arguments.engine_arguments(source, item, engines)
    spaces = _spaces(source, engines)
    serve: dict[str, Any] = {"engine": engines[0] if len(engines) == 1 else engines}
    if len(engines) == 1:
        if given[engines[0]]:
            serve["engine_args"] = {key: value for key, (_, value) in given[engines[0]].items()}
    else:
        arguments.add_to_spaces(source, given, spaces)
    serve["profile"] = _profile(source, item)
    if (resources := item.pop("resources", None)) is not None:
        source.note("serve[0].resources", f"dropped ({resources}): they follow from the knobs", "auto_tuner.space")
    machines, nodes, _, _ = cluster(source)
    if engines == ["llamacpp"] and nodes == 1 and machines.pop("devices_per_node", None):
        text = "dropped: llama.cpp uses the devices that are found, or the CPU cores"
        source.note("experiment.runner.nproc_per_node", text, "cluster")
    source.drop(f"{_TUNER}.control.train_iters", "nothing is trained", "auto_tuner.control")
    budgets = control(source, "serve")
    tuner = {
        "space": spaces[engines[0]] if len(engines) == 1 else spaces,
        "control": budgets,
        "objective": _objective(source),
    }
    source.drop("experiment.runner.deploy", "each trial starts the engine's own server", "serve")
    for key, value in leaves(item):
        source.note(f"serve[0]{key}", f"dropped ({value}): unknown to flagcore", "serve")
    return {"model": model, "cluster": machines, "serve": serve, "auto_tuner": tuner}


def _check_not_disaggregated(source: Source, item: Mapping[str, Any]) -> None:
    """Raise SpecError for prefill and decoding on different servers, which flagcore's trials do not start."""
    key = "experiment.runner.deploy.prefill_decode_disaggregation"
    given = {key: True} if source.at(key) is True else {}
    arguments = [(path, value) for path, value in leaves(item) if flag_name(path) in _DISAGGREGATION]
    given |= {f"serve[0]{path}": value for path, value in arguments if value not in (False, "null")}
    for at, value in given.items():
        problem, fix = "puts prefill and decoding on different servers, which trials do not start", "remove it"
        raise source.error(at, problem, value=value, fix=f"{fix} to plan and tune servers that do both")


def _item(source: Source) -> dict[str, Any]:
    """Take the first model of the list, the one that FlagScale tunes."""
    items = layouts.model_list(source)
    for place, other in enumerate(items[1:], start=1):
        name = other.get("serve_id") if isinstance(other, dict) else other
        source.note(f"serve[{place}]", f"dropped ({name}): the first model of the list is tuned", "serve")
    if not items or not isinstance(items[0], dict):
        raise source.error("serve", "has no model", fix="give a list with serve_id, engine and engine_args")
    item = dict(items[0])
    if (name := item.pop("serve_id", None)) is not None:
        source.note("serve[0].serve_id", f"dropped ({name}): it is FlagScale's name of the model", "serve")
    return item


def _engines(source: Source, item: dict[str, Any]) -> list[str]:
    own, wanted = item.pop("engine", None), source.take(f"{_TUNER}.engines")
    key, at = f"{_TUNER}.engines", "serve.engine"
    if isinstance(own, (dict, list)):
        fix = f"give one of {', '.join(list(ENGINES)[:3])}, and its arguments under engine_args"
        raise source.error("serve[0].engine", "is not an engine", value=own, fix=fix)
    quiet = not wanted
    if not wanted:
        wanted = own or list(DEFAULT_ENGINES)
        text = f"is missing: {wanted} is tuned; FlagScale's default is {' and '.join(DEFAULT_ENGINES)}"
        source.note(key, text, at)
    found, wrong = list[str](), list[SpecError]()
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if not isinstance(name, str) or name not in ENGINES:
            fix = f"use {', '.join(list(ENGINES)[:3])}"
            key = key if name != own else "serve[0].engine"
            wrong.append(source.error(key, "is not a supported engine", value=name, fix=fix))
            continue
        if name != ENGINES[name]:
            source.note(key, f"{name} is {ENGINES[name]} in flagcore", at)
        found.append(ENGINES[name])
    if not found:
        raise join_errors(wrong)
    source.problems += wrong
    if own is not None and not quiet:
        source.note("serve[0].engine", f"auto_tuner.engines is used instead of {own}", at)
    return list(dict.fromkeys(found))


def _model(source: Source, item: dict[str, Any], engines: list[str]) -> str:
    """Return the path of the weights, for llama.cpp the first GGUF file of a folder, as FlagScale does."""
    args = item.get("engine_args")
    if not isinstance(args, (dict, type(None))):
        raise source.error("serve[0].engine_args", "must be a mapping", value=args, fix="write its keys below it")
    specific = item.get("engine_args_specific")
    places = [args, *(specific.values() if isinstance(specific, dict) else ())]
    found = [
        each.pop(key)
        for each in places
        if isinstance(each, dict)
        for key in list(each)
        if key.replace("-", "_") in ("model", "model_path", "model_tag")
    ]
    if not found and (module := item.get("module")):
        problem, fix = "is a program; only an engine's server can be tuned", "give engine and engine_args instead"
        raise source.error("serve[0].module", problem, value=module, fix=fix)
    if not found or not isinstance(found[0], str):
        raise source.error("serve[0].engine_args.model", "is missing", fix="give the path of the weights")
    path, key = Path(found[0]).expanduser().resolve(), "serve[0].engine_args.model"
    source.note(key, "the shape is read there; so are the weights unless serve.weights is given", "model")
    if engines == ["llamacpp"]:
        path = next(iter(sorted(path.rglob("*.gguf"))), path) if path.is_dir() else path
    elif "llamacpp" in engines:
        source.note(key, "one path for all engines, but llamacpp needs a GGUF file: tune it separately", "model")
    return str(path)


def _spaces(source: Source, engines: list[str]) -> dict[str, dict[str, Any]]:
    given = source.section(f"{_TUNER}.space")
    sections = {ENGINES[key]: given.pop(key) for key in list(given) if key in ENGINES}
    found = {engine: _space_of(source, engine, sections.get(engine)) for engine in engines}
    for engine in sections.keys() - set(engines):
        source.note(
            f"{_TUNER}.space.{flagscale_name(engine)}",
            "dropped: auto_tuner.engines does not name it",
            "auto_tuner.space",
        )
    for engine in engines:
        flat = _knobs(source, engine, given, f"{_TUNER}.space", quiet=len(engines) > 1)
        for key, value in flat.items():
            where, at = f"{_TUNER}.space.{key}", f"auto_tuner.space.{key}"
            if key in found[engine]:
                source.note(where, f"{value} is ignored by FlagScale; the section of {engine} is used", at)
            else:
                source.note(
                    where, f"FlagScale ignores it outside of an engine's section; flagcore tries it with {engine}", at
                )
                found[engine][key] = value
    for key in given if len(engines) > 1 else ():
        if not any(KNOB_NAMES.get(key, key) in KNOBS[engine] for engine in engines):
            source.note(f"{_TUNER}.space.{key}", "dropped: not a knob of these engines", "auto_tuner.space")
    for engine in engines:
        if not sections.get(engine):
            own = {key: value for key, value in OWN_SPACE[engine].items() if key not in found[engine]}
            text = f"has no values for {engine}: FlagScale's defaults are used ({', '.join(own)})"
            source.note(f"{_TUNER}.space", text, "auto_tuner.space")
            found[engine] = {**own, **found[engine]}
    return found


def _space_of(source: Source, engine: str, given: object) -> dict[str, Any]:
    at = f"{_TUNER}.space.{flagscale_name(engine)}"
    if not isinstance(given, Mapping):
        return {}
    found = _knobs(source, engine, given, at)
    if autos := [key for key, value in found.items() if value == "auto"]:
        text = "auto is a few values that flagcore chooses; candidates may use fewer devices than the cluster has"
        source.note(f"{at} ({', '.join(autos)})", text, "auto_tuner.space")
    return found


def _knobs(source: Source, engine: str, given: Mapping[str, Any], at: str, *, quiet: bool = False) -> dict[str, Any]:
    """Return the keys that are knobs of an engine, by flagcore's names."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name, where = KNOB_NAMES.get(key, key), "auto_tuner.space"
        if key != name:
            source.note(f"{at}.{key}", f"is {name} in flagcore", f"{where}.{name}")
        if key == "swap_space":
            text = "dropped: removed in vLLM 0.18; the flag kv_offloading_size is the closest option"
            source.note(f"{at}.{key}", text, where)
            continue
        if name not in KNOBS[engine]:
            if not quiet:
                source.note(f"{at}.{key}", f"dropped: not a knob of {engine}", where)
            continue
        values = list(value) if isinstance(value, list) else value
        listed = values if isinstance(values, list) else [values]
        if name == "block_size" and _UNSUPPORTED_BLOCK in listed:
            values = [each for each in listed if each != _UNSUPPORTED_BLOCK]
            source.note(f"{at}.{key}", "8 is dropped: no backend supports blocks of 8 tokens", f"{where}.{name}")
        if name == "split_mode":
            source.note(
                f"{at}.{key}", "is applied; FlagScale lists it but never passes it to the engine", f"{where}.{name}"
            )
        if values in ([], None):
            continue
        found[name] = values
    return found


def _profile(source: Source, item: dict[str, Any]) -> dict[str, Any]:
    given = source.mapping("serve[0].profile", item.pop("profile", None))
    found = {key: given.pop(key, own) for key, own in _PROFILE.items()}
    for key, value in given.items():
        source.note(f"serve[0].profile.{key}", f"dropped ({value}): unknown to flagcore", "serve.profile")
    text = "all requests are sent at once, as FlagScale does; to tune latencies give concurrency or a rate instead"
    source.note("serve[0].profile", text, "serve.profile.request_rate")
    text = "every answer has its full length; in FlagScale the model may end it earlier"
    source.note("serve[0].profile.output_len", text, "serve.profile.output_len")
    return {**found, "request_rate": "inf"}


def _objective(source: Source) -> str:
    metric, order = source.take(f"{_PERFORMANCE}.metric", "itl"), source.take(f"{_PERFORMANCE}.order")
    key, at = f"{_PERFORMANCE}.metric", "auto_tuner.objective"
    if not isinstance(metric, str) or metric not in _OBJECTIVES:
        fix = f"use {', '.join(list(_OBJECTIVES)[:6])}"
        source.report(key, "is not a metric of FlagScale's", value=metric, fix=fix)
        return ""
    found = _OBJECTIVES[metric]
    best = "descend" if found.endswith("per_s") else "ascend"
    note = ": a typo for TPOT" if metric == "topt" else ", prompts and answers" if "token_t" in metric else ""
    mean = "" if best == "descend" else "; the mean of all requests"
    source.note(key, f"{metric} is {found} in flagcore{note}{mean}", at)
    if order is None and best == "descend":
        source.note(f"{_PERFORMANCE}.order", "is missing: FlagScale would minimize, flagcore maximizes", at)
    if order is not None:
        text = f"follows from {found}" if order == best else f"dropped ({order}): {found} is best in the order {best}"
        source.note(f"{_PERFORMANCE}.order", text, at)
    return found
