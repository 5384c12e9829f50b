"""Tables of the keys of a spec, from its JSON Schema, and of the knobs and the rules of engines, from their records.

Also texts of the reference from docstrings: the results of the Python API, the fields of result.json, and the hooks.
"""

import inspect
import json
import re
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flagcore_goodput.job import JobDocument
from flagcore_megatron.space.knobs import KNOBS
from flagcore_rl.documents import RlDocument
from flagcore_serving.documents import ServeDocument
from flagcore_serving.engine import ServingEngine
from flagcore_vendorkit.chip_file import load_chips

import flagcore
from flagcore import errors, hooks
from flagcore.domain.chip import Chip, Fact, Link, Source
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.knob import Flag, Knob
from flagcore.domain.spec import Task
from flagcore.plugins import ENGINES, engines, find_engine, names
from flagcore.report import result
from flagcore.spec.convert import parse_spec
from flagcore.spec.schema import document_of
from flagcore.spec.validate import describe, keys_of

MARK = re.compile(r"^<!-- keys (train|serve|rl|goodput):([\w.]*) -->$", re.MULTILINE)
"""The first line of a block of keys."""
KEYS_HEAD = "| key | values | default | meaning |\n| --- | --- | --- | --- |"


def render_keys(mark: str) -> str:
    """Return the table of the keys of a section of the spec: `keys KIND:SECTION`."""
    kind, _, section = mark.split()[1].partition(":")
    return _table_of_keys(kind, tuple(filter(None, section.split("."))))


@lru_cache
def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a spec of this kind."""
    documents: dict[str, Any] = {"train": document_of("megatron", KNOBS), "serve": ServeDocument, "rl": RlDocument}
    documents["goodput"] = JobDocument
    return dict(documents[kind].model_json_schema())


def _table_of_keys(kind: str, section: tuple[str, ...]) -> str:
    root = schema(kind)
    rows = [_row_of_key(str(path[-1]), each, root) for path, each in keys_of(root, root) if path[:-1] == section]
    return "\n".join([KEYS_HEAD, *rows])


def _row_of_key(name: str, key: dict[str, Any], root: dict[str, Any]) -> str:
    default = key.get("default", "required")
    if isinstance(default, dict):
        default = "absent"
    default_text = (
        default if isinstance(default, str) and default in ("required", "absent") else f"`{json.dumps(default)}`"
    )
    cells = (f"`{name}`", _values(describe(key, root)), default_text, key["description"])
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def _values(text: str) -> str:
    """Return a description of values without limits that only detect typing errors."""
    return re.sub(r"(text|a string|a whole number from \d+) (?:of 1 )?to \d{3,}(?: characters)?", r"\1", text)


SERVING = {each.name: each for each in map(find_engine, names(ENGINES)) if isinstance(each, ServingEngine)}
MODEL = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
MODEL |= {"num_query_groups": 8, "vocab_size": 128256, "num_moe_experts": 64, "moe_router_topk": 8}
TRAIN = {"seq_length": 4096, "global_batch_size": 512, "precision": "bf16"}
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23", "lmdeploy": "0.18.0", "trtllm": "1.4.0", "mindie": "3.1.0"}
ARGUMENTS = {"sglang": {"attention_backend": "flashmla"}, "llamacpp": {"ctx_size": 4096}}
"""Arguments of servers that activate further rules."""
CHIP = next(chip for chip in load_chips("flagcore_nvidia") if chip.name == "H200")
RATE = Fact(value=1e9, source=Source(kind="estimated", detail="for messages only"))
CPU = replace(CHIP, link=Link(name="cores", topology="shared-memory", bytes_per_second=RATE))
"""A chip whose devices are cores, for the rules of CPUs."""
KNOBS_HEAD = "| knob | flag | releases | values | `auto` tries | meaning |\n| --- | --- | --- | --- | --- | --- |"
VALUES = {"int": "whole number", "share": "above 0, at most 1", "flag": "true, false"}


def render_knobs(mark: str) -> str:
    """Return the table of the knobs of an engine: `knobs ENGINE`."""
    name = mark.split()[1]
    return "\n".join([KNOBS_HEAD, *map(_row_of_knob, SERVING[name].knobs)])


def _row_of_knob(knob: Knob) -> str:
    by_release = [flag for flag in knob.flags if flag.versions or flag.word] or knob.flags[:1]
    flag = ", ".join(map(partial(_flag, knob), by_release)) or "–"
    values = VALUES.get(knob.kind) or ", ".join(knob.words) or "layouts such as 2xtp2+1xtp4"
    neutral_text = "" if knob.neutral in (None, 1) and knob.neutral is not True else f" ({str(knob.neutral).lower()})"
    releases = knob.versions or "all"
    return f"| `{knob.name}` | {flag} | {releases} | {values}{neutral_text} | {knob.auto_help} | {knob.help} |"


def _flag(knob: Knob, flag: Flag) -> str:
    """Return a flag, and its releases if other releases have another one."""
    releases = f" ({flag.versions})" if flag.versions else ""
    name = flag.off if knob.neutral is True else flag.name
    return f"`{'--' if len(name) > 1 else '-'}{name}`{releases}"


def render_rules(mark: str) -> str:
    """Return the table of the rules of an engine, with their messages for an example task: `rules ENGINE`.

    `rules ENGINE mixed` has the further rules of clusters with two kinds of chips.
    """
    _, name, *mixed = mark.split()
    messages = _messages(_task(name, CHIP), _task(name, CPU))
    if mixed:
        further = _messages(_task(name, CHIP, replace(CHIP, name="C550")))
        messages = {rule: message for rule, message in further.items() if rule not in messages}
    rows = [f"| `{rule}` | {message.replace('|', '&#124;')} |" for rule, message in messages.items()]
    return "\n".join(["| rule | message |", "| --- | --- |", *rows])


def _messages(*tasks: Task) -> dict[str, str]:
    """Return the message of each rule, for the first of the tasks that has it."""
    found: dict[str, str] = {}
    for task in tasks:
        for rule in find_engine(task.spec.work.engine).rules(task):
            found.setdefault(rule.name, rule.message)
    return found


def _task(engine: str, *chips: Chip) -> Task:
    """Return a task of a mixture of experts, for one node with 8 devices of each chip."""
    kind = find_engine(engine).kind
    work = {"train": TRAIN, "serve": {"engine_version": VERSIONS.get(engine), "engine_args": ARGUMENTS.get(engine, {})}}
    data = {"model": MODEL, "cluster": {}, kind: {**work[kind], "engine": engine}}
    if len(chips) > 1:
        data |= {"cluster": {"groups": [{"chip": chip.name} for chip in chips]}}
        data |= {"auto_tuner": {"space": {"meshes": "auto"}}}
    if kind == "serve":
        data["serve"] |= {"weights": "model", "command": ["/bin/true"]}
    spec = parse_spec(data, file="rules", base=Path(), engines=engines())
    groups = tuple(NodeGroup(chip=chip, nodes=1, devices_per_node=8) for chip in chips)
    return Task(spec=spec, cluster=Cluster(groups=groups))


GROUPS = (hooks.ChipHooks, hooks.CostHooks, hooks.EngineHooks, hooks.TrialHooks)
HOOKS = {name: hook for group in GROUPS for name, hook in vars(group).items() if name.startswith("flagcore_")}
"""The specification of each hook, in the order of flagcore/hooks.py."""
INTERNAL = ("knobs", "labels", "search_state")
"""Fields that only flagcore's own text of a result uses."""


def render_result(mark: str) -> str:
    """Return the docstring of a class of results, and its fields with their types: `python CLASS`.

    `python functions` is the table of all functions with their signatures, `python errors` that of the exceptions.
    """
    if mark == "python functions":
        return _functions()
    if mark == "python errors":
        return _errors()
    kind: Any = getattr(flagcore, mark.split()[1])
    rows = [(each.name, _type_text(each.type)) for each in fields(kind)]
    rows += [
        (name, _type_text(inspect.signature(each.fget).return_annotation))
        for name, each in vars(kind).items()
        if isinstance(each, property) and each.fget
    ]
    listed = ", ".join(f"`{name}: {text}`" for name, text in rows if name not in INTERNAL)
    return f"{inspect.cleandoc(kind.__doc__)}\n\nFields: {listed}."


def render_hook(mark: str) -> str:
    """Return the docstring of a hook: `hook NAME`."""
    return inspect.cleandoc(HOOKS[mark.split()[1]].__doc__ or "")


def render_record(mark: str) -> str:
    """Return the table of the fields of a record, from the docstring of its class in flagcore/report/result.py.

    `record NAME`.
    """
    text = inspect.cleandoc(getattr(result, mark.split()[1]).__doc__ or "")
    items = re.findall(r"^- (`.+?`): (.+?)(?=^- |\Z)", text, re.DOTALL | re.MULTILINE)
    rows = (f"| {names} | {' '.join(meaning.split())} |" for names, meaning in items)
    return "\n".join(["| field | meaning |", "| --- | --- |", *rows])


def _functions() -> str:
    rows = ["| function | what it does |", "| --- | --- |"]
    for name in flagcore.__all__:
        found = getattr(flagcore, name)
        if inspect.isfunction(found):
            parameters = ", ".join(inspect.signature(found).parameters)
            text = " ".join(inspect.cleandoc(found.__doc__ or "").split("\n\nRaises")[0].split())
            returned = _type_text(inspect.signature(found).return_annotation)
            rows.append(f"| `{name}({parameters}) -> {returned}` | {text} |")
    return "\n".join(rows)


def _errors() -> str:
    """Return a table of the exceptions with their exit codes."""
    kinds = [
        each
        for each in vars(errors).values()
        if inspect.isclass(each) and issubclass(each, errors.FlagError) and each.__module__ == errors.__name__
    ]
    rows = [f"| `{each.__name__}` | {each.exit_code} | {' '.join((each.__doc__ or '').split())} |" for each in kinds]
    return "\n".join(["| error | exit code | raised for |", "| --- | --- | --- |", *rows])


def _type_text(annotation: Any) -> str:
    """Return a type as it is written in an annotation, without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+", "", text)
