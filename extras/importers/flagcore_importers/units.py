"""Reads units of systemd, podman (Quadlet) and supervisord."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.domain.launch import Start
from flagcore.errors import SpecError
from flagcore_importers.containers import Images, container_run
from flagcore_importers.values import BRACED, KEYS, dotenv, filled, left_out, literal_variables, split_words

UNIT = re.compile(r"(?m)^\[(Service|Container|program:.*)\]")
"""A section of a unit that starts a program."""
_FILE, _OPTIONS = "EnvironmentFile", {"AddDevice": "--device", "Entrypoint": "--entrypoint"}


def programs_of(text: str, folder: Path, images: Images) -> Iterator[Start]:
    """Yield the programs of a unit, which is in `folder`. Raises SpecError."""
    joined = re.sub(r"(?m)^\s*[#;\[].*", "", re.sub(r"\\\n\s*", " ", text))
    lines = [line.partition("=") for line in joined.splitlines()]
    pairs = [(key.strip(), value.strip()) for key, equals, value in lines if equals]
    found = dict(pairs)
    envs, missing = _environment(pairs, folder)
    start = Start(envs=envs, left_out=left_out(KEYS.unit, found) | ({_FILE: "it is not here"} if missing else {}))
    for value in [value for key, value in pairs if key in ("ExecStart", "command") and value]:
        words = filled(split_words(value.lstrip("-@+!:").replace("%h", str(Path.home()))), BRACED, envs)
        names = ", ".join(re.findall(r"\$\{?(\w+)", " ".join(words)))
        if missing and names and not re.search(r"\bsh -\w*c ", " ".join(words)):
            problem, fix = f"is not on this machine, but sets {names}", "copy it beside the unit"
            raise SpecError(key=_FILE, value=missing, problem=problem, fix=fix)
        yield replace(start, words=words)
    if "Image" in found:
        yield container_run(start, [*_podman_words(pairs), found["Image"], *split_words(found.get("Exec", ""))], images)


def _podman_words(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the options of podman that a unit sets."""
    for key, value in pairs:
        if key == "PodmanArgs":
            yield from split_words(value)
        elif key in _OPTIONS:
            yield from (_OPTIONS[key], value)


def _environment(pairs: Sequence[tuple[str, str]], folder: Path) -> tuple[dict[str, str], str]:
    """Return the variables of a unit in `folder`, and the last of its files that are not here."""
    envs, missing = dict[str, str](), ""
    for key, value in sorted(pairs, key=lambda each: each[0] == _FILE):  # files override the unit
        if key in ("Environment", "environment"):
            envs |= literal_variables(split_words(value if key[0] == "E" else value.replace(",", " ")))
        elif key == _FILE:
            file = Path(value.lstrip("-"))
            here = next((each for each in (file, folder / file.name) if each.is_file()), None)
            envs |= dotenv(here) if here else {}
            missing = missing if here else str(file)
    return envs, missing
