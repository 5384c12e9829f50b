"""A tree that serves: a list under `serve`, and FlagScale's spaces of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagcore.importers.flagscale import arguments, layouts
from flagcore.importers.flagscale.engines import BY_ITSELF, ENGINES, KNOBS, OWN_SPACE, SPELT, spelt
from flagcore.importers.flagscale.experiment import checked_experiment, cluster, control, drop_the_rest, environment
from flagcore.importers.flagscale.source import Source, leaves
from flagcore.spec.plain_data import spec_error

_TUNER, _PERFORMANCE = "experiment.auto_tuner", "experiment.auto_tuner.performance"
_OBJECTIVES = {
    "e2e_latency": "e2e_s",
    "request_throughput": "requests_per_s",
    "token_throughput": "total_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "ttft": "ttft_s",
    "itl": "itl_s",
    "topt": "tpot_s",
    "tpot": "tpot_s",
}
_PROFILE = {"prefix_len": 0, "input_len": 1024, "output_len": 1024, "num_prompts": 200, "range_ratio": 0.5}
"""FlagScale's own load."""
_BAD_BLOCK = 8


def serving(source: Source) -> dict[str, Any]:
    """Return the data of a spec that serves. Raises SpecError where something that it needs is missing."""
    checked_experiment(source)
    source.drop("experiment.task.entrypoint", "each trial starts the engine's own server", "serve")
    source.drop("experiment.task.backend", "the model's engine, or auto_tuner.engines, counts", "serve.engine")
    item = _item(source)
    engines = _engines(source, item)
    layouts.moved_out_of_arguments(source, item, [spelt(each) for each in engines])
    model, weights = _model(source, item, engines)
    given = arguments.of_engines(source, item, engines)
    spaces = _spaces(source, engines)
    serve: dict[str, Any] = {"engine": engines[0] if len(engines) == 1 else engines}
    if weights != model:
        serve["weights"] = weights
    if len(engines) == 1:
        if given[engines[0]]:
            serve["engine_args"] = {key: value for key, (_, value) in given[engines[0]].items()}
    else:
        arguments.into_spaces(source, given, spaces)
    serve["profile"] = _profile(source, item)
    _drop_resources(source, item)
    machines, nodes, _ = cluster(source)
    if engines == ["llamacpp"] and nodes == 1 and machines.pop("devices_per_node", None):
        text = "dropped: devices are those that are found, cores where there is no accelerator; threads are cores"
        source.note("experiment.runner.nproc_per_node", text, "cluster")
    source.drop(f"{_TUNER}.control.train_iters", "nothing is trained", "auto_tuner.control")
    budgets = control(source, seconds=3000)
    tuner = {
        "space": spaces[engines[0]] if len(engines) == 1 else spaces,
        "control": budgets,
        "objective": _objective(source),
    }
    source.drop("experiment.runner.deploy", "each trial starts the engine's own server at a port of its own", "serve")
    envs = environment(source)
    drop_the_rest(source)
    for key, value in leaves(item):
        source.note(f"serve[0]{key}", f"dropped ({value}): not known to flagcore", "serve")
    made = {"model": model, "cluster": machines, "serve": serve, "auto_tuner": tuner}
    return {**made, "envs": envs} if envs else made


def _item(source: Source) -> dict[str, Any]:
    """Return the first model of the list, the one that FlagScale tunes."""
    items = layouts.model_list(source)
    for place, other in enumerate(items[1:], start=1):
        name = other.get("serve_id") if isinstance(other, dict) else other
        source.note(f"serve[{place}]", f"dropped ({name}): the first model of the list is tuned", "serve")
    if not items or not isinstance(items[0], dict):
        fix = "give a list with serve_id, engine and engine_args"
        raise spec_error("serve", "has no model", fix=fix, file=source.file)
    item = dict(items[0])
    if (name := item.pop("serve_id", None)) is not None:
        source.note("serve[0].serve_id", f"dropped ({name}): it is FlagScale's word for the model", "serve")
    return item


def _engines(source: Source, item: dict[str, Any]) -> list[str]:
    """Return flagcore's names of the engines that are tuned."""
    own, asked = item.pop("engine", None), source.take(f"{_TUNER}.engines")
    key, at = f"{_TUNER}.engines", "serve.engine"
    if isinstance(own, (dict, list)):
        fix = f"give one of {', '.join(list(ENGINES)[:3])}, and its arguments under engine_args"
        raise spec_error("serve[0].engine", "is no engine's name", value=own, fix=fix, file=source.file)
    quiet = not asked
    if not asked:
        asked = own or list(BY_ITSELF)
        text = f"is not there: {asked} is tuned; FlagScale tries {' and '.join(BY_ITSELF)} then"
        source.note(key, text, at)
    found = []
    for name in asked if isinstance(asked, list) else [asked]:
        if not isinstance(name, str) or name not in ENGINES:
            fix = f"use {', '.join(list(ENGINES)[:3])}"
            key = key if name != own else "serve[0].engine"
            raise spec_error(key, "is no engine that flagcore knows", value=name, fix=fix, file=source.file)
        if name != ENGINES[name]:
            source.note(key, f"{name} is called {ENGINES[name]}", at)
        found.append(ENGINES[name])
    if own is not None and not quiet:
        has = "and has it" if ENGINES.get(str(own)) in found else f"not {own}"
        source.note("serve[0].engine", f"auto_tuner.engines counts, {has}", at)
    return list(dict.fromkeys(found))


def _model(source: Source, item: dict[str, Any], engines: list[str]) -> tuple[str, str]:
    """Return where the shape is read, and the weights."""
    args = item.get("engine_args")
    if not isinstance(args, (dict, type(None))):
        fix = "write its keys below it"
        raise spec_error("serve[0].engine_args", "must be a mapping", value=args, fix=fix, file=source.file)
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
        problem, fix = "is a program of its own, and an engine's server is tuned", "give engine and engine_args instead"
        raise spec_error("serve[0].module", problem, value=module, fix=fix, file=source.file)
    if not found or not isinstance(found[0], str):
        fix = "give the path of the weights"
        raise spec_error("serve[0].engine_args.model", "is missing", fix=fix, file=source.file)
    path, key = Path(found[0]).expanduser().resolve(), "serve[0].engine_args.model"
    source.note(key, "model is its shape, and the weights are there unless serve.weights says otherwise", "model")
    if engines == ["llamacpp"]:
        path = _gguf(path)
    elif "llamacpp" in engines:
        source.note(key, "one path for all engines, but llamacpp serves a GGUF file only: tune it by itself", "model")
    return str(path), str(path)


def _gguf(path: Path) -> Path:
    """Return the first GGUF file of a directory, as FlagScale does."""
    files = sorted(path.rglob("*.gguf")) if path.is_dir() else []
    return files[0] if files else path


def _spaces(source: Source, engines: list[str]) -> dict[str, dict[str, Any]]:
    """Return the knobs of each engine."""
    given = source.section(f"{_TUNER}.space")
    sections = {ENGINES[key]: given.pop(key) for key in list(given) if key in ENGINES}
    found = {engine: _space_of(source, engine, sections.get(engine)) for engine in engines}
    for engine in sections.keys() - set(engines):
        source.note(
            f"{_TUNER}.space.{spelt(engine)}", "dropped: auto_tuner.engines does not name it", "auto_tuner.space"
        )
    for engine in engines:
        flat = _knobs(source, engine, given, f"{_TUNER}.space", quiet=len(engines) > 1)
        for key, value in flat.items():
            where, at = f"{_TUNER}.space.{key}", f"auto_tuner.space.{key}"
            if key in found[engine]:
                source.note(where, f"{value} is ignored by FlagScale; what is said of {engine} counts", at)
            else:
                source.note(where, f"is ignored by FlagScale, beside its engines; here it is tried by {engine}", at)
                found[engine][key] = value
    for key in given if len(engines) > 1 else ():
        if not any(SPELT.get(key, key) in KNOBS[engine] for engine in engines):
            source.note(f"{_TUNER}.space.{key}", "dropped: no knob of these engines", "auto_tuner.space")
    for engine in engines:
        if not sections.get(engine):
            own = {key: value for key, value in OWN_SPACE[engine].items() if key not in found[engine]}
            text = f"has nothing for {engine}: FlagScale's own is taken ({', '.join(own)})"
            source.note(f"{_TUNER}.space", text, "auto_tuner.space")
            found[engine] = {**own, **found[engine]}
    return found


def _space_of(source: Source, engine: str, given: object) -> dict[str, Any]:
    at = f"{_TUNER}.space.{spelt(engine)}"
    if not isinstance(given, Mapping):
        return {}
    found = _knobs(source, engine, given, at)
    if autos := [key for key, value in found.items() if value == "auto"]:
        text = "auto is a few values of flagcore's own; splits and instances may use fewer devices than there are"
        source.note(f"{at} ({', '.join(autos)})", text, "auto_tuner.space")
    return found


def _knobs(source: Source, engine: str, given: Mapping[str, Any], at: str, *, quiet: bool = False) -> dict[str, Any]:
    """Return what an engine has as knobs, by flagcore's names."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name, where = SPELT.get(key, key), "auto_tuner.space"
        if key != name:
            source.note(f"{at}.{key}", f"is called {name}", f"{where}.{name}")
        if key == "swap_space":
            text = "dropped: vLLM has it no more since 0.18; the flag kv_offloading_size is the nearest that there is"
            source.note(f"{at}.{key}", text, where)
            continue
        if name not in KNOBS[engine]:
            if not quiet:
                source.note(f"{at}.{key}", f"dropped: no knob of {engine}", where)
            continue
        values = list(value) if isinstance(value, list) else value
        if name == "block_size" and (values == _BAD_BLOCK or (isinstance(values, list) and _BAD_BLOCK in values)):
            values = [each for each in values if each != _BAD_BLOCK] if isinstance(values, list) else []
            source.note(f"{at}.{key}", "8 is dropped: no backend takes blocks of 8 tokens", f"{where}.{name}")
        if name == "split_mode":
            source.note(f"{at}.{key}", "is applied here; FlagScale lists it, but never passes it on", f"{where}.{name}")
        if values in ([], None):
            continue
        found[name] = values
    return found


def _profile(source: Source, item: dict[str, Any]) -> dict[str, Any]:
    given = source.mapping("serve[0].profile", item.pop("profile", None))
    found = {key: given.pop(key, own) for key, own in _PROFILE.items()}
    for key, value in given.items():
        source.note(f"serve[0].profile.{key}", f"dropped ({value}): not known to flagcore", "serve.profile")
    text = "all requests come at once, as FlagScale sends them; give concurrency or a rate instead for times to a token"
    source.note("serve[0].profile", text, "serve.profile.request_rate")
    text = "every answer has its full length; FlagScale's end where the model ends them"
    source.note("serve[0].profile.output_len", text, "serve.profile.output_len")
    return {**found, "request_rate": "inf"}


def _drop_resources(source: Source, item: dict[str, Any]) -> None:
    if (given := item.pop("resources", None)) is not None:
        text = f"dropped ({given}): instances and devices of each follow from the knobs"
        source.note("serve[0].resources", text, "auto_tuner.space")


def _objective(source: Source) -> str:
    metric, order = source.take(f"{_PERFORMANCE}.metric", "itl"), source.take(f"{_PERFORMANCE}.order")
    key, at = f"{_PERFORMANCE}.metric", "auto_tuner.objective"
    if not isinstance(metric, str) or metric not in _OBJECTIVES:
        fix = f"use {', '.join(list(_OBJECTIVES)[:6])}"
        raise spec_error(key, "is no metric of FlagScale's", value=metric, fix=fix, file=source.file)
    found = _OBJECTIVES[metric]
    best = "descend" if found.endswith("per_s") else "ascend"
    slip = ": topt is its slip for TPOT" if metric == "topt" else ", prompts and answers" if "token_t" in metric else ""
    mean = "" if best == "descend" else "; of all requests its mean counts"
    source.note(key, f"{metric} is called {found}{slip}{mean}", at)
    if order is None and best == "descend":
        source.note(f"{_PERFORMANCE}.order", "is not there: FlagScale would take the least, flagcore the most", at)
    if order is not None:
        text = f"follows from {found}" if order == best else f"dropped ({order}): {found} is best in the order {best}"
        source.note(f"{_PERFORMANCE}.order", text, at)
    return found
