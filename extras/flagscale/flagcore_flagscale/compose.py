"""Composes a configuration with hydra, and converts older layouts: moved sections, and lists in place of mappings.

The layouts are from the examples in FlagScale's repository since 2024, and from its slides.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flagcore.errors import SpecError
from flagcore.spec.plain_data import MAX_DEPTH, plain, spec_error
from flagcore_flagscale.source import TABLES, Source

_MANDATORY_PATTERN = re.compile(r"\$\{([\w.]+):\?\?\??\}")
"""FlagScale's notation for a reference to a mandatory key."""
_RAISED_PATTERN = re.compile(r"^\w+ raised while resolving interpolation: ")
_TOP_FILE = "give the folder that has the tree's top file"
_SUGGESTIONS = 12
_OVERRIDE_FIXES: dict[str, str] = TABLES["override_fixes"]
Unresolved = list[tuple[str, str]]


def compose(directory: Path, name: str, overrides: Sequence[str], *, file: str) -> tuple[dict[str, Any], Unresolved]:
    """Return the configuration with resolved interpolations, and the keys that cannot be resolved, with reasons.

    Its key `hydra` contains hydra's own settings from the top file and the overrides. Raises SpecError, also if an
    override sets an action other than auto_tune.
    """
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not directory.is_dir():
        raise spec_error("--config-path", "is not a directory", value=str(directory), fix=_TOP_FILE)
    if "/" in name:
        raise spec_error("--config-name", "contains a folder", value=name, fix="give the folder to --config-path")
    name = name.removesuffix(".yaml")
    if (directory / f"{name.removesuffix('.json')}.json").is_file() and not (directory / f"{name}.yaml").is_file():
        problem, fix = "is a JSON config of FlagScale 0.3 or older", "use a YAML config of FlagScale 0.6 or newer"
        raise spec_error("--config-name", problem, value=name, fix=fix)
    try:
        with initialize_config_dir(str(directory.resolve()), version_base=None, job_name="flagcore"):
            composition = composed(name, overrides=_without_action(overrides, file))
        raw = OmegaConf.to_container(composition, resolve=False)
        top_file = OmegaConf.to_container(OmegaConf.load(directory / f"{name}.yaml"), resolve=False)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise _compose_error(error, directory, name, overrides, file) from None
    assert isinstance(raw, dict)
    if hydra_settings := _hydra_settings(top_file, overrides):
        raw["hydra"] = hydra_settings
    unresolved: Unresolved = []
    tree = OmegaConf.create(_plain_references(raw))
    assert isinstance(tree, DictConfig)
    return plain(_resolve(tree, (), unresolved, file), file=file), unresolved


def _without_action(overrides: Sequence[str], file: str) -> list[str]:
    """Return the overrides without the action. Raises SpecError for an action other than auto_tune."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, remaining = OverridesParser.create(), []
    for each, parsed in zip(overrides, parser.parse_overrides(list(overrides)), strict=True):
        if parsed.key_or_group != "action" or parsed.is_delete():
            remaining.append(each)
        elif parsed.is_sweep_override() or parsed.value() != "auto_tune":
            fix, value = "use action=auto_tune, or leave it out", each.partition("=")[2]
            raise spec_error("action", "is not supported", value=value, fix=fix, file=file)
    return remaining


def _hydra_settings(top_file: object, overrides: Sequence[str]) -> dict[str, Any]:
    """Return hydra's own settings in the top file and in the overrides."""
    section = top_file.get("hydra") if isinstance(top_file, dict) else None
    result = dict(section) if isinstance(section, dict) else {}
    for each in overrides:
        key, _, value = each.lstrip("+~").partition("=")
        if key.startswith(("hydra.", "hydra/")):
            result[key[len("hydra.") :]] = value or "gone"
    return result


def _plain_references(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain_references(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_references(each) for each in value]
    return _MANDATORY_PATTERN.sub(r"${\1}", value) if isinstance(value, str) else value


def _resolve(node: Any, path: tuple[str, ...], unresolved: Unresolved, file: str) -> Any:
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    if len(path) > MAX_DEPTH:
        raise spec_error(path, "is nested too deep, or contains itself", fix="flatten it", file=file)
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    if node._is_none():
        return None
    keys = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    values: dict[Any, Any] = {}
    for key in keys:
        key_path = (*path, str(key))
        try:
            values[key] = _resolve(node[key], key_path, unresolved, file)
        except OmegaConfBaseException as error:
            message = _RAISED_PATTERN.sub("", str(error).splitlines()[0]).strip('"')
            unresolved.append((".".join(key_path), message))
    return values if isinstance(node, DictConfig) else list(values.values())


def _compose_error(error: Exception, directory: Path, name: str, overrides: Sequence[str], file: str) -> SpecError:
    """Convert an error of hydra or OmegaConf to a SpecError with its line, override or key."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError):
        return _yaml_error(error, directory, file)
    if isinstance(error, UnicodeDecodeError):
        return spec_error("the tree", "is not UTF-8 text", fix="save its files as UTF-8", file=file)
    if isinstance(error, RecursionError):
        problem, fix = "contains itself, by an anchor or by defaults that name one another", "remove the cycle"
        return spec_error("the tree", problem, fix=fix, file=file)
    if isinstance(error, MissingConfigException):
        return _missing_error(error, directory, name, file)
    message = next(_lines(error), type(error).__name__)
    if isinstance(error, OverrideParseException):
        message = "" if "LexerNoViableAlt" in message else f": {message}"
        fix = "write key=value, with quotes if needed: key='a b', and an index as serve.0"
        return spec_error("the override", f"is invalid{message}", value=error.override, fix=fix, file=file)
    if override := next((each for each in overrides if _is_about(str(error), each)), None):
        fixes = [fix for start, fix in _OVERRIDE_FIXES.items() if message.startswith(start)]
        fix = "".join(fixes).format(override=override.lstrip("+")) or "fix it, or leave it out"
        return spec_error("the override", f"is invalid: {message}", value=override, fix=fix, file=file)
    cause = next((each for each in _causes(error) if getattr(each, "full_key", None)), error)
    problem = f"cannot be composed: {next(_lines(cause), message)}"
    key = str(getattr(cause, "full_key", None) or "the tree")
    return spec_error(key, problem, fix="fix the tree or the overrides", file=file)


def _missing_error(error: Any, directory: Path, name: str, file: str) -> SpecError:
    missing_file = error.missing_cfg_file or ""
    if missing_file in ("", name):
        fix = _suggestion(sorted(path.stem for path in directory.glob("*.yaml")), name) or _TOP_FILE
        return spec_error("--config-name", f"is not a file in {directory}", value=name, fix=fix)
    group, _, last = str(missing_file).rpartition("/")
    fix = _suggestion(sorted(error.options or ()), last) or f"create the folder {group}, or remove it from defaults"
    return spec_error("defaults", f"needs {missing_file}.yaml, which does not exist", fix=fix, file=file)


def _yaml_error(error: Any, directory: Path, file: str) -> SpecError:
    mark = error.problem_mark or error.context_mark
    path = Path(mark.name) if mark else Path(file)
    if path.is_relative_to(directory.resolve()):
        path = directory / path.relative_to(directory.resolve())
    problem = f"is not valid YAML: {error.problem or error.context}"
    key = f"line {mark.line + 1}" if mark else "the file"
    return spec_error(key, problem, fix="fix the line, or the one before it", file=str(path))


def _suggestion(names: Sequence[str], name: str) -> str:
    matches = get_close_matches(name, names, n=3) or names[:_SUGGESTIONS]
    return f"use {', '.join(matches)}" if matches else ""


def _is_about(message: str, override: str) -> bool:
    """Return whether hydra's error message is about an override."""
    key = override.lstrip("+~").partition("=")[0]
    group = "Config group override" in message and "." not in key
    return override in message or f"'{key}'" in message or group


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lines(error: BaseException) -> Iterator[str]:
    """Yield the lines of an error message without hydra's links and markers."""
    for line in str(error).splitlines():
        if line.strip("^ ") and not line.strip().startswith(("See http", "full_key:", "object_type")):
            yield " ".join(line.split()).rstrip(".")


_EXPERIMENT, _RUNNER = "experiment", "experiment.runner"
MOVED_KEYS: dict[str, str] = TABLES["moved_keys"]
_PROFILE = ("profile", "resources")


def normalize_layout(source: Source) -> None:
    """Move keys to their usual sections, with a note on each. Raises SpecError if there is no section `experiment`."""
    experiment = source.left.get(_EXPERIMENT)
    if experiment is not None and not isinstance(experiment, dict):
        raise source.error(_EXPERIMENT, "must be a mapping", value=experiment, fix="write its keys below it")
    if experiment is None:
        matches = get_close_matches(_EXPERIMENT, source.left.keys() - {_EXPERIMENT}, n=1)
        fix = f"did you mean {matches[0]}?" if matches else "give the tree's top file, which has it, as --config-name"
        raise source.error(_EXPERIMENT, "is missing", fix=fix)
    for key in ("task", "runner", "auto_tuner"):
        if not isinstance(given := experiment.get(key), (dict, type(None))):
            if key != "task":
                fix = "write its keys below it"
                raise source.error(f"{_EXPERIMENT}.{key}", "must be a mapping", value=given, fix=fix)
            experiment["task"] = {"type": given}
            source.note(f"{_EXPERIMENT}.task", f"read as {_EXPERIMENT}.task.type")
    for old_key, new_key in MOVED_KEYS.items():
        if (value := source.take(old_key)) is None:
            continue
        source.note(old_key, f"read as {new_key}")
        for key in source.put(new_key, value):
            suffix = f".{key}" if key else ""
            source.note(f"{old_key}{suffix}", f"dropped ({value[key] if key else value}): {new_key}{suffix} is used")


def model_list(source: Source) -> list[Any]:
    """Take the list of models of a serving configuration, or build it from `model_args` of older configurations."""
    section = source.take("serve")
    if not isinstance(section, dict):
        return section if isinstance(section, list) else [section]
    models = section.pop("model_args", None)
    if not isinstance(models, dict):
        return [section]
    _take_nodes(source, section)
    if section:
        source.note(f"serve ({', '.join(section)})", "dropped: each trial starts the engine's own server", "serve")
    items = []
    for index, (name, flags) in enumerate(models.items()):
        args = {key.replace("-", "_"): value for key, value in flags.items()} if isinstance(flags, dict) else {}
        switches = args.pop("action_args", None) or []
        if not isinstance(switches, list):
            source.note(f"serve.model_args.{name}.action-args", f"dropped ({switches}): it is not a list", "serve")
            switches = []
        args |= {str(each).replace("-", "_"): True for each in switches}
        if (tag := args.pop("model_tag", None)) is not None:
            args = {"model": tag, **args}
        source.note(f"serve.model_args.{name}", f"read as serve[{index}].engine_args", "serve")
        items.append({"serve_id": name, "engine": "vllm", "engine_args": args})
    return items


def _take_nodes(source: Source, serve: dict[str, Any]) -> None:
    """Move the hosts that the oldest configurations list under `serve` to the nodes and slots of the runner."""
    nodes = serve["hostfile"].get("nodes") if isinstance(serve.get("hostfile"), dict) else None
    hosts = (
        [host for each in nodes if isinstance(each, dict) for host in each.values()] if isinstance(nodes, list) else []
    )
    slots = [host["slots"] for host in hosts if isinstance(host, dict) and type(host.get("slots")) is int]
    if not slots or len(slots) < len(hosts) or min(slots) < 1:
        return
    del serve["hostfile"]
    for key, value in (("nnodes", len(slots)), ("nproc_per_node", min(slots))):
        source.put(f"{_RUNNER}.{key}", value)
    text = f"dropped: {len(slots)} hosts of {min(slots)} slots; used if the runner does not define them"
    source.note("serve.hostfile", text, "cluster")


def normalize_specific_arguments(source: Source, item: dict[str, Any], engines: list[str]) -> None:
    """Move profiles and arguments that are not in an engine's section out of `engine_args_specific`."""
    specific = item.get("engine_args_specific")
    if not isinstance(specific, dict):
        return
    for key in _PROFILE:
        if isinstance(specific.get(key), dict):
            item.setdefault(key, specific.pop(key))
            source.note(f"serve[0].engine_args_specific.{key}", f"read as serve[0].{key}")
    ungrouped = [key for key, value in specific.items() if not isinstance(value, (dict, type(None)))]
    if not ungrouped:
        return
    arguments = {key: specific.pop(key) for key in ungrouped}
    engine = engines[0]
    specific[engine] = {**arguments, **(specific.get(engine) or {})}
    text = f"read as arguments of {engine}: FlagScale expects them in a section of the engine"
    source.note(f"serve[0].engine_args_specific ({', '.join(ungrouped)})", text, "serve.engine_args")
