"""What the forms of starting a program share: words, variables, counts of devices, and keys that are not read."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flagcore.domain.files import read_regular
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import MAX_VALUES, SafeLoader, package_yaml

NO_DEVICE = re.compile("(?i)rdma|hca|roce|efa|nic|fuse|hugepages|/.*(mem|core|monitoring|priority)")
"""Extended resources of Kubernetes that are not accelerators, such as a share's memory (values.yaml of HAMi 2.10)."""
BRACED = r"\$\{?(\w+)\}?"
"""A variable of a shell in a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Regular expressions of the options and keys of each form that are read, or that change no speed (`keys.yaml`)."""

    docker_run: str
    switches: str
    compose: str
    compose_file: str
    manifest: str
    container: str
    pod: str
    values: str
    unit: str
    sbatch: str
    slurm_switches: str
    programs: str
    tools: str


KEYS = Keys(**{form: re.sub(r"\n\s*", "", each) for form, each in package_yaml(__package__, "keys.yaml").items()})


def left_out(known: str, given: Mapping[Any, Any], path: str = "") -> dict[str, str]:
    """Return the keys, with their values, that are neither read nor without effect on speed: those not in `known`."""
    found = dict[str, str]()
    for key, value in ((f"{path}{key}", value) for key, value in given.items() if value not in (None, "", [], {})):
        if not re.fullmatch(known, key):
            is_list = isinstance(value, list) and any(isinstance(each, Mapping) for each in value)  # may have secrets
            text = f"a list of {len(value)}" if is_list else str(value)
            found |= left_out(known, value, f"{key}.") if isinstance(value, Mapping) else {key: text}
    return found


def filled(words: Iterable[str], pattern: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `words` with each match of `pattern` replaced by the value of the variable that its group names."""
    return tuple(re.sub(pattern, lambda each: values.get(each[1], each[0]), word) for word in words)


def text_of(file: Path) -> str:
    """Return the text of a file, or an empty text if it cannot be read."""
    with suppress(OSError):
        return read_regular(file).decode("utf-8", errors="replace")
    return ""


def dotenv(file: Path) -> dict[str, str]:
    """Return the variables in a file such as .env; empty if it cannot be read."""
    return dict(re.findall(r"^[ \t]*(\w+)=[\"']?(.*?)[\"']?[ \t\r]*$", text_of(file), re.MULTILINE))


def count_devices(value: Any) -> int | None:
    """Return the number of accelerators in a number, a text such as `NAME:8` or `80GB:4..8`, or resources."""
    if isinstance(value, Mapping):
        counts = [positive(count) for key, count in value.items() if "/" in key and not NO_DEVICE.search(key)]
        names = [key for key in value if "/" not in key and key[:1].isupper()]
        named = (positive(value[key]) or count_devices(key) for key in names)
        return next(iter((*counts, *named, *([count_devices(value["count"])] if "count" in value else []))), None)
    fields = re.findall(r"(?<![^:])(\d+)(?:\.\.\d*)?(?![^:])", str(value))
    return positive(fields[-1]) if fields else None


def literal_variables(entries: Any) -> dict[str, str]:
    """Return the environment variables with literal values in a mapping, a list of NAME=VALUE, or a manifest's list."""
    pairs = (
        entries.items()
        if isinstance(entries, Mapping)
        else (
            (*each.split("=", 1), None)[:2] if isinstance(each, str) else (each.get("name"), each.get("value"))
            for each in entries or ()
        )
    )
    return {str(name): str(value) for name, value in pairs if value is not None}


def split_words(text: str) -> list[str]:
    """Return the words of a command as a shell splits them. Raises UsageError."""
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(_("the command cannot be split into words: {reason}", reason=error)) from None


def words_of(value: Any) -> list[str]:
    """Return the words of a command, which is a string, a list, or missing."""
    return split_words(value) if isinstance(value, str) else [str(each) for each in value or ()]


def positive(value: Any) -> int | None:
    """Return a number or text as a positive integer, or None for other values, such as `all`."""
    return int(value) if str(value).isdecimal() and int(value) > 0 else None


def count_of(value: Any, usual: int = 1) -> int:
    """Return a number or text as a positive integer, or `usual` for other values."""
    return positive(value) or usual


def load_documents(text: str, loader_type: Any = SafeLoader) -> Iterator[Any]:
    """Yield the YAML documents in `text`. Raises yaml.YAMLError, also if aliases multiply them beyond MAX_VALUES."""
    loader, size = loader_type(text), 0
    while loader.check_node():
        node = loader.get_node()
        size += _expanded_size(node, {})
        if size > MAX_VALUES:
            raise yaml.YAMLError(f"has more than {MAX_VALUES:,} values, with its aliases")
        yield loader.construct_document(node)


def _expanded_size(node: Any, sizes: dict[int, int]) -> int:
    """Return the number of values below nodes, with those of aliases; a long text counts as several.

    A node that contains itself has too many.
    """
    if isinstance(node, (list, tuple)):
        return sum(_expanded_size(each, sizes) for each in node)
    if id(node) not in sizes:
        sizes[id(node)] = MAX_VALUES
        is_text = isinstance(node.value, str)
        sizes[id(node)] = 1 + (len(node.value) // 64 if is_text else _expanded_size(node.value, sizes))
    return sizes[id(node)]
