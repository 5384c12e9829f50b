"""Texts of the reference from docstrings: the results of the Python API, the fields of result.json, and the hooks."""

import inspect
import re
from dataclasses import fields
from typing import Any

import flagcore
from flagcore import errors, hooks
from flagcore.report import result

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
