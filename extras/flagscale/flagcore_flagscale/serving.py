"""Translates a serving configuration: a list under `serve`, and a space for each engine.

With instances that only prefill or only decode, FlagScale starts prefill_num and decode_num instances with the same
arguments, behind its own router, and moves caches with vLLM's P2pNcclConnector. Source: FlagScale 0.8
`flagscale/runner/runner_serve.py`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagcore_importers.dialect import flat
from flagcore_megatron.importing.arguments import flag_name
from flagcore_serving.space.hardware import PP, PREFILL_DECODE, TP
from flagcore_serving.space.knobs import LAYOUT, LENGTHS, TRANSFER, parse_length

from flagcore.errors import SpecError, join_errors
from flagcore.spec.models import absolute_model
from flagcore_flagscale import compose
from flagcore_flagscale.experiment import control, machines
from flagcore_flagscale.source import (
    COMMON_ARGUMENTS,
    DEFAULT_ENGINES,
    DEFAULT_SPACE,
    ENGINES,
    KNOB_NAMES,
    KNOBS,
    KNOBS_BY_ARGUMENT,
    PROGRAMS,
    RESERVED_ARGUMENTS,
    TABLES,
    Source,
    flagscale_name,
)

_TUNER, _PERFORMANCE = "experiment.auto_tuner", "experiment.auto_tuner.performance"
_OBJECTIVES: dict[str, str] = TABLES["objectives"]
_PROFILE: dict[str, Any] = TABLES["own_profile"]
_UNSUPPORTED_BLOCK = 8


def serving(source: Source) -> dict[str, Any]:
    """Return the data of a spec for serving. Raises SpecError for missing keys."""
    source.drop("experiment.task.entrypoint", "each trial starts the engine's own server", "serve")
    source.drop("experiment.task.backend", "the engine is that of the model, or auto_tuner.engines", "serve.engine")
    item = _item(source)
    _check_single_server(source, item)
    engines = _engines(source, item)
    compose.normalize_specific_arguments(source, item, [flagscale_name(each) for each in engines])
    model = _model(source, item, engines)
    arguments_by_engine = engine_arguments(source, item, engines)
    spaces = _spaces(source, engines)
    _convert_disaggregation(source, engines, arguments_by_engine, spaces)
    serve: dict[str, Any] = {"engine": engines[0] if len(engines) == 1 else engines}
    if len(engines) == 1:
        if arguments_by_engine[engines[0]]:
            serve["engine_args"] = {key: value for key, (_, value) in arguments_by_engine[engines[0]].items()}
    else:
        add_to_spaces(source, arguments_by_engine, spaces)
    serve["profile"] = _profile(source, item)
    if (resources := item.pop("resources", None)) is not None:
        source.note("serve[0].resources", f"dropped ({resources}): they follow from the knobs", "auto_tuner.space")
    found = machines(source)
    if engines == ["llamacpp"] and found.nodes == 1 and found.section.pop("devices_per_node", None):
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
    for key, value in flat(item):
        if value != {}:
            source.note(f"serve[0].{key}", f"dropped ({value}): unknown to flagcore", "serve")
    if found.nodes > 1 and "hostfile" in found.section:
        tuner["launcher"] = "ssh"
    return {"model": model, "cluster": found.section, "serve": serve, "auto_tuner": tuner}


def _item(source: Source) -> dict[str, Any]:
    """Take the first model of the list, which FlagScale tunes."""
    items = compose.model_list(source)
    for index, other in enumerate(items[1:], start=1):
        name = other.get("serve_id") if isinstance(other, dict) else other
        source.note(f"serve[{index}]", f"dropped ({name}): the first model of the list is tuned", "serve")
    if not items or not isinstance(items[0], dict):
        raise source.error("serve", "has no model", fix="give a list with serve_id, engine and engine_args")
    item = dict(items[0])
    if (name := item.pop("serve_id", None)) is not None:
        source.note("serve[0].serve_id", f"dropped ({name}): it is FlagScale's name of the model", "serve")
    return item


def _engines(source: Source, item: dict[str, Any]) -> list[str]:
    item_engine, requested = item.pop("engine", None), source.take(f"{_TUNER}.engines")
    key, spec_key = f"{_TUNER}.engines", "serve.engine"
    if isinstance(item_engine, (dict, list)):
        fix = f"give one of {', '.join(list(ENGINES)[:3])}, and its arguments under engine_args"
        raise source.error("serve[0].engine", "is not an engine", value=item_engine, fix=fix)
    is_default = not requested
    if not requested:
        requested = item_engine or list(DEFAULT_ENGINES)
        text = f"is missing: {requested} is tuned; FlagScale's default is {' and '.join(DEFAULT_ENGINES)}"
        source.note(key, text, spec_key)
    engines, problems = list[str](), list[SpecError]()
    for name in requested if isinstance(requested, list) else [requested]:
        if not isinstance(name, str) or name not in ENGINES:
            fix = f"use {', '.join(list(ENGINES)[:3])}"
            key = key if name != item_engine else "serve[0].engine"
            problems.append(source.error(key, "is not a supported engine", value=name, fix=fix))
            continue
        if name != ENGINES[name]:
            source.note(key, f"{name} is {ENGINES[name]} in flagcore", spec_key)
        engines.append(ENGINES[name])
    if not engines:
        raise join_errors(problems)
    source.problems += problems
    if item_engine is not None and not is_default:
        source.note("serve[0].engine", f"auto_tuner.engines is used instead of {item_engine}", spec_key)
    return list(dict.fromkeys(engines))


def _model(source: Source, item: dict[str, Any], engines: list[str]) -> str:
    """Return the path or public name of the weights; for llama.cpp, the first GGUF file of a folder."""
    args = item.get("engine_args")
    if not isinstance(args, (dict, type(None))):
        raise source.error("serve[0].engine_args", "must be a mapping", value=args, fix="write its keys below it")
    specific = item.get("engine_args_specific")
    sections = [args, *(specific.values() if isinstance(specific, dict) else ())]
    paths = [
        each.pop(key)
        for each in sections
        if isinstance(each, dict)
        for key in list(each)
        if key.replace("-", "_") in ("model", "model_path", "model_tag")
    ]
    if not paths and (module := item.get("module")):
        problem, fix = "is a program; only an engine's server can be tuned", "give engine and engine_args instead"
        raise source.error("serve[0].module", problem, value=module, fix=fix)
    if not paths or not isinstance(paths[0], str):
        raise source.error("serve[0].engine_args.model", "is missing", fix="give the path of the weights")
    path, key = Path(absolute_model(os.path.expanduser(paths[0]), Path())), "serve[0].engine_args.model"
    source.note(key, "the shape is read from it, and so are the weights unless serve.weights is set", "model")
    if engines == ["llamacpp"]:
        path = next(iter(sorted(path.rglob("*.gguf"))), path) if path.is_dir() else path
    elif "llamacpp" in engines:
        source.note(key, "one path for all engines, but llamacpp needs a GGUF file: tune it separately", "model")
    return str(path)


def _spaces(source: Source, engines: list[str]) -> dict[str, dict[str, Any]]:
    tree_space = source.section(f"{_TUNER}.space")
    sections = {ENGINES[key]: tree_space.pop(key) for key in list(tree_space) if key in ENGINES}
    spaces = {engine: _space_of(source, engine, sections.get(engine)) for engine in engines}
    for engine in sections.keys() - set(engines):
        key, text = f"{_TUNER}.space.{flagscale_name(engine)}", "dropped: auto_tuner.engines does not name it"
        source.note(key, text, "auto_tuner.space")
    for engine in engines:
        knobs = _knobs(source, engine, tree_space, f"{_TUNER}.space", is_quiet=len(engines) > 1)
        for key, value in knobs.items():
            tree_key, spec_key = f"{_TUNER}.space.{key}", f"auto_tuner.space.{key}"
            text = f"FlagScale ignores it outside of an engine's section; flagcore tries it with {engine}"
            if key in spaces[engine]:
                text = f"{value} is ignored by FlagScale; the section of {engine} is used"
            source.note(tree_key, text, spec_key)
            spaces[engine].setdefault(key, value)
    known = frozenset[str]().union(*map(KNOBS.__getitem__, engines))
    for key in tree_space if len(engines) > 1 else ():
        if KNOB_NAMES.get(key, key) not in known:
            source.note(f"{_TUNER}.space.{key}", "dropped: not a knob of these engines", "auto_tuner.space")
    for engine in engines:
        if not sections.get(engine):
            defaults = {key: value for key, value in DEFAULT_SPACE[engine].items() if key not in spaces[engine]}
            text = f"has no values for {engine}: FlagScale's defaults are used ({', '.join(defaults)})"
            source.note(f"{_TUNER}.space", text, "auto_tuner.space")
            spaces[engine] = {**defaults, **spaces[engine]}
    return spaces


def _space_of(source: Source, engine: str, section: object) -> dict[str, Any]:
    tree_key = f"{_TUNER}.space.{flagscale_name(engine)}"
    if not isinstance(section, Mapping):
        return {}
    knobs = _knobs(source, engine, section, tree_key)
    if autos := [key for key, value in knobs.items() if value == "auto"]:
        text = "auto tries a few values chosen by flagcore; candidates may use fewer devices than the cluster has"
        source.note(f"{tree_key} ({', '.join(autos)})", text, "auto_tuner.space")
    return knobs


def _knobs(
    source: Source, engine: str, section: Mapping[str, Any], tree_key: str, *, is_quiet: bool = False
) -> dict[str, Any]:
    """Return the knobs of an engine in `section`, with flagcore's names and their values."""
    knobs: dict[str, Any] = {}
    for key, value in section.items():
        name = KNOB_NAMES.get(key, key)
        at, spec_key = f"{tree_key}.{key}", f"auto_tuner.space.{name}"
        if key != name:
            source.note(at, f"is {name} in flagcore", spec_key)
        if key == "swap_space":
            text = "dropped: removed in vLLM 0.18; the flag kv_offloading_size is the closest option"
            source.note(at, text, "auto_tuner.space")
            continue
        if name not in KNOBS[engine]:
            if not is_quiet:
                source.note(at, f"dropped: not a knob of {engine}", "auto_tuner.space")
            continue
        values = list(value) if isinstance(value, list) else value
        listed = values if isinstance(values, list) else [values]
        if name == "block_size" and _UNSUPPORTED_BLOCK in listed:
            values = [each for each in listed if each != _UNSUPPORTED_BLOCK]
            source.note(at, "8 is dropped: no backend supports blocks of 8 tokens", spec_key)
        if name == "split_mode":
            source.note(at, "is applied; FlagScale lists it but never passes it to the engine", spec_key)
        if values in ([], None):
            continue
        knobs[name] = values
    return knobs


def _profile(source: Source, item: dict[str, Any]) -> dict[str, Any]:
    section = source.mapping("serve[0].profile", item.pop("profile", None))
    profile = {key: section.pop(key, own) for key, own in _PROFILE.items()}
    for key, value in section.items():
        source.note(f"serve[0].profile.{key}", f"dropped ({value}): unknown to flagcore", "serve.profile")
    text = "all requests are sent at once, as FlagScale does; to tune latencies give concurrency or a rate instead"
    source.note("serve[0].profile", text, "serve.profile.request_rate")
    text = "every answer has its full length; in FlagScale the model may end it earlier"
    source.note("serve[0].profile.output_len", text, "serve.profile.output_len")
    return {**profile, "request_rate": "inf"}


def _objective(source: Source) -> str:
    metric, order = source.take(f"{_PERFORMANCE}.metric", "itl"), source.take(f"{_PERFORMANCE}.order")
    key, spec_key = f"{_PERFORMANCE}.metric", "auto_tuner.objective"
    if not isinstance(metric, str) or metric not in _OBJECTIVES:
        fix = f"use {', '.join(list(_OBJECTIVES)[:6])}"
        source.report(key, "is not a metric of FlagScale's", value=metric, fix=fix)
        return ""
    objective = _OBJECTIVES[metric]
    best = "descend" if objective.endswith("per_s") else "ascend"
    note = ": a typo for TPOT" if metric == "topt" else ", prompts and answers" if "token_t" in metric else ""
    mean = "" if best == "descend" else "; the mean of all requests"
    source.note(key, f"{metric} is {objective} in flagcore{note}{mean}", spec_key)
    if order is None and best == "descend":
        source.note(f"{_PERFORMANCE}.order", "is missing: FlagScale would minimize, flagcore maximizes", spec_key)
    if order is not None:
        text = f"dropped ({order}): {objective} is best in the order {best}"
        source.note(f"{_PERFORMANCE}.order", f"follows from {objective}" if order == best else text, spec_key)
    return objective


_DEPLOY = "experiment.runner.deploy"
_SWITCH = f"{_DEPLOY}.prefill_decode_disaggregation"
_OF_ONE_SERVER = ("kv_transfer_config", "disaggregation_mode")
"""Arguments for a single server that only prefills or only decodes, without its counterpart."""
_SIZES = {"tensor_parallel_size": TP, "tp": TP, "pipeline_parallel_size": PP, "pp": PP}
_CONNECTOR, _DECODE_MEMORY = "P2pNcclConnector", 0.7


def _check_single_server(source: Source, item: Mapping[str, Any]) -> None:
    """Raise SpecError for a single server that only prefills or decodes."""
    for path, value in flat(item):
        if flag_name(path) in _OF_ONE_SERVER and value not in (None, {}, False, "null"):
            problem = "is an argument of one of several servers, which trials would not start"
            fix = f"remove it, and set {_SWITCH}"
            raise source.error(f"serve[0].{path}", problem, value=value, fix=fix)


def _convert_disaggregation(
    source: Source,
    engines: list[str],
    arguments: dict[str, dict[str, tuple[str, Any]]],
    spaces: dict[str, dict[str, Any]],
) -> None:
    """Set the space for instances that only prefill or only decode. It replaces the layouts. Raises SpecError."""
    if source.take(_SWITCH) is not True:
        return
    if engines != ["vllm"]:
        fix = "set auto_tuner.engines to vllm, or remove it"
        raise source.error(_SWITCH, "is for vLLM only: FlagScale starts no other engine", value=True, fix=fix)
    space, sizes = spaces["vllm"], {TP: 1, PP: 1}
    for name in list(arguments["vllm"]):
        if (knob := _SIZES.get(name.replace("-", "_"), name)) in sizes:
            sizes[knob] = arguments["vllm"].pop(name)[1]
    for name in LAYOUT:
        if space.pop(name, None) is not None:
            text = f"dropped: {_SWITCH} determines the layout"
            source.note(f"experiment.auto_tuner.space.{name}", text, f"auto_tuner.space.{PREFILL_DECODE}")
    layout = "".join(f"{name}{sizes[knob]}" for name, knob in (("tp", TP), ("pp", PP)) if sizes[knob] != 1)
    kinds = [f"{_instances(source, kind)}x{layout or 'tp1'}" for kind in ("prefill", "decode")]
    space[PREFILL_DECODE], space[TRANSFER] = ["+".join(kinds)], [_CONNECTOR]
    source.note(_SWITCH, f"is {PREFILL_DECODE} = {space[PREFILL_DECODE][0]}", f"auto_tuner.space.{PREFILL_DECODE}")
    source.note(_SWITCH, f"moves caches by {_CONNECTOR}", f"auto_tuner.space.{TRANSFER}")
    memory = source.take(f"{_DEPLOY}.decode_gpu_memory_utilization") or _DECODE_MEMORY
    text = f"dropped ({memory}, of decoding instances): both kinds have the share of the space or of the engine"
    source.note(f"{_DEPLOY}.decode_gpu_memory_utilization", text, "auto_tuner.space.gpu_memory_utilization")
    for name, reason in TABLES["dropped_of_disaggregation"].items():
        if (value := source.take(f"{_DEPLOY}.{name}")) is not None:
            source.note(f"{_DEPLOY}.{name}", f"dropped ({value}): {reason}", "serve")


def _instances(source: Source, kind: str) -> int:
    """Take the number of instances of a kind, by default 1. Raises SpecError."""
    count = source.take(key := f"{_DEPLOY}.{kind}_num", 1)
    if type(count) is not int or count < 1:
        raise source.error(key, "is not a number of instances", value=count, fix="use 1 or more")
    return count


_SPEC_KEY = "serve.engine_args"

Arguments = dict[str, tuple[str, Any]]
"""Maps the engine's name of each argument to its key in the configuration and its value."""


def engine_arguments(source: Source, item: dict[str, Any], engines: list[str]) -> dict[str, Arguments]:
    """Take the arguments of a model, and return the arguments of each engine. Specific arguments override common
    ones."""
    common, specific = (
        source.mapping(f"serve[0].{key}", item.pop(key, None)) for key in ("engine_args", "engine_args_specific")
    )
    specific_arguments = {ENGINES.get(name, name): given for name, given in specific.items() if isinstance(given, dict)}
    for name in specific_arguments.keys() - set(engines):
        shown = flagscale_name(name) if name in KNOBS else name
        source.note(f"serve[0].engine_args_specific.{shown}", "dropped: it is not tuned", _SPEC_KEY)
    arguments: dict[str, Arguments] = {}
    for engine in engines:
        result: Arguments = {}
        for key, value in common.items():
            _add_argument(source, engine, f"engine_args.{key}", value, COMMON_ARGUMENTS[engine], result)
        for key, value in specific_arguments.get(engine, {}).items():
            _add_argument(source, engine, f"engine_args_specific.{flagscale_name(engine)}.{key}", value, None, result)
        arguments[engine] = result
    return arguments


def add_to_spaces(source: Source, arguments_by_engine: dict[str, Arguments], spaces: dict[str, dict[str, Any]]) -> None:
    """Add the arguments of several engines to their spaces as knobs with one value.

    `serve.engine_args` of a spec applies to all engines, so it cannot contain arguments of a single engine.
    """
    for engine, arguments in arguments_by_engine.items():
        for key, (tree_key, value) in arguments.items():
            knob = KNOBS_BY_ARGUMENT.get(key, key)
            if knob not in KNOBS[engine]:
                text = f"dropped for {engine} ({value}): with several engines only knobs can differ"
                source.note(tree_key, text, _SPEC_KEY)
            elif knob in spaces[engine]:
                path = f"auto_tuner.space.{engine}.{knob}"
                source.note(tree_key, f"dropped for {engine} ({value}): the space has values for it", path)
            else:
                spaces[engine][knob] = value


def _add_argument(
    source: Source, engine: str, key: str, value: Any, names: dict[str, str] | None, result: Arguments
) -> None:
    """Add one argument under the engine's name. `names` maps common names to it; without `names` the name stays."""
    tree_key, name = f"serve[0].{key}", key.rpartition(".")[2].lstrip("-").replace("-", "_")
    engine_name = name if names is None or engine == "vllm" else names.get(name)
    if name in RESERVED_ARGUMENTS:
        source.note(tree_key, f"dropped: {RESERVED_ARGUMENTS[name]}", _SPEC_KEY)
        return
    if isinstance(value, (dict, list)):
        source.note(tree_key, f"dropped ({value}): flagcore passes on single values", _SPEC_KEY)
        return
    if engine_name is None:
        source.note(tree_key, f"dropped ({value}): FlagScale has no name for it in {engine}", _SPEC_KEY)
        return
    spec_key = f"{_SPEC_KEY}.{engine_name}"
    if engine_name != name:
        of_slots = "the context of all slots together, as FlagScale passes it to llama.cpp; in vLLM it is per sequence"
        text = f"ctx_size: {of_slots}" if engine_name == "ctx_size" else f"{engine} calls it {engine_name}"
        source.note(tree_key, text, spec_key)
    if engine_name == "kv_cache_type" and engine == "llamacpp" and str(value).startswith("fp8"):
        source.note(tree_key, f"{value} becomes q8_0 for keys and values", spec_key)
        value = "q8_0"
    value = _with_full_path(name, value)
    if engine_name in result and result[engine_name][1] != value:
        previous_key, previous = result[engine_name]
        source.note(previous_key, f"dropped for {engine} ({previous}): {tree_key} is used", spec_key)
    if not _is_known(engine, engine_name.replace("_", "-")):
        text = f"is passed to {engine}, but unknown to flagcore: not in the predictions"
        source.note(tree_key, text, spec_key)
    result[engine_name] = tree_key, parse_length(value, PROGRAMS["vllm"].units) if name in LENGTHS else value


def _with_full_path(name: str, value: Any) -> Any:
    """Return the value of an argument, or the full path if it is one that exists."""
    is_path = isinstance(value, str) and (name in TABLES["path_arguments"] or value.startswith("./"))
    return str(Path(value).resolve()) if is_path and os.path.exists(value) else value


def _is_known(engine: str, flag: str) -> bool:
    """Return whether a table knows a flag of an engine, without dashes before it."""
    program = PROGRAMS[engine]
    return bool(program.knob_of(flag)[0] or program.knows_flag(flag) or not program.settings.unclassed([flag]))
