"""Spaces with their predictions, kept between commands: the next command about the same plan starts with them.

A file's name is the hash of all that determines its content: what the search was asked, the files of the packages that
answer, the installed distributions, the user's data, the environment and the machine. So nothing is ever outdated, and
files are only removed because they are old or many. They are the user's own: arrays and JSON, without code. The hash of
the rest stands in front of each file: what is damaged is computed again.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from logging import Logger, getLogger
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np

from flagcore.domain.files import data_folder, read_regular
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Candidate, Space
from flagcore.loading.entry_points import installed

T = TypeVar("T")
LOG = getLogger("flagcore")
SWITCH = "FLAGCORE_CACHE"
"""The environment variable that turns keeping off with the value `off`."""
LEAST_SECONDS = 0.3
"""What took less is not kept: to read it takes a few hundredths of a second."""
MOST_BYTES, ALL_BYTES, ALL_FILES, MOST_DAYS = 64 << 20, 256 << 20, 200, 30
"""The most bytes of a file and of all, the most files, and the days after which an unused file is removed."""
RECORDS: Mapping[str, type] = {kind.__name__: kind for kind in (Axis, Candidate, Predictions, Space)}
GROUPS = ("flagcore.plugins", "flagcore.engines", "flagcore.kinds", "flagcore.models", "flagcore.mixers")
"""The groups of entry points whose packages predict."""
MOST_ENTRIES = 1000
"""The most entries of a folder that count. More have folders of data sets, which a spec may name."""
PASSING = {"_", "OLDPWD", "PWD", "SHLVL", "KMP_DUPLICATE_LIB_OK"}
"""Variables that a shell changes from command to command, and one that threadpoolctl 3.8 sets when it is imported."""


class Named:
    """An object that its `identity` tells from others: what else it has is what it has answered so far."""

    @property
    def identity(self) -> object:
        raise NotImplementedError


def kept(compute: Callable[[], T], about: Iterable[object], is_certain: Callable[[], bool]) -> T:
    """Return the result of `compute`, or what an earlier command computed for the same.

    `about`: what determines the result beside packages, data, environment and machine. `is_certain`: whether the result
    may be kept, asked at the end. A result that cannot be read, or kept, is computed.
    """
    file = None
    if os.environ.get(SWITCH) != "off":
        with suppress(TypeError, RecursionError, OSError, ValueError):  # unknown content, an empty cell, or no folder
            file = cache_folder() / f"{_key(about)}.plan"
    if file is None:
        return compute()
    try:
        result: T = _read(file)
        os.utime(file)
        return result
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, EOFError, BadZipFile) as error:
        LOG.info("%s cannot be read, and is computed again: %s", file, error)
    start = time.monotonic()
    result = compute()
    if time.monotonic() - start >= LEAST_SECONDS and is_certain():
        with suppress(OSError, TypeError):
            _write(file, result)
            _tidy(file.parent)
    return result


def cache_folder() -> Path:
    """Return the folder of kept results, in XDG_CACHE_HOME or ~/.cache. Raises OSError if others may write to it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache")) / "flagcore" / "plans"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others")
    return folder


def _key(about: Iterable[object]) -> str:
    """Return the hash of all that determines a result. Raises TypeError if the content of something is unknown."""
    digest = sha256()
    for part in (*_content(tuple(about)), *_state()):
        digest.update(part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def _state() -> Iterator[object]:
    """Yield the state of packages, data, environment and machine."""
    yield sys.version, sys.prefix, os.uname(), sorted(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES")
    yield sorted((name, value) for name, value in os.environ.items() if name not in PASSING)
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError):
            yield sorted(_status(each) for each in os.scandir(folder or ".") if each.name.endswith(("-info", ".pth")))
    points = (point for group in GROUPS for each in installed(group).values() for point in each)
    names = {name.partition(".")[0] for name in (*sys.modules, *(point.value.partition(":")[0] for point in points))}
    # the names and times of installed distributions tell their content
    places = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    libraries = tuple(f"{Path(place).resolve()}{os.sep}" for place in (os.path.dirname(os.__file__), *places))
    for name in sorted(names):
        spec = None
        with suppress(ImportError, ValueError, AttributeError):
            spec = find_spec(name)
        origin = os.path.realpath(spec.origin) if spec and spec.origin else ""
        if os.path.isfile(origin) and (name.startswith("flagcore") or not origin.startswith(libraries)):
            yield from _files(os.path.dirname(origin) if spec and spec.submodule_search_locations else origin, 9)
    yield from _files(data_folder(), 1)


def _files(place: str | Path, depth: int = 0) -> Iterator[object]:
    """Yield the state of a file, or of the files in a folder, with `depth` levels of folders below it."""
    with suppress(OSError):
        yield str(place), None if os.path.isdir(place) else _times(os.stat(place))
        for entry in sorted(islice(os.scandir(place), MOST_ENTRIES), key=lambda each: each.name):
            if entry.is_dir() and depth and entry.name != "__pycache__":
                yield from _files(entry.path, depth - 1)
            elif entry.is_file():
                yield _status(entry)


def _status(entry: "os.DirEntry[str]") -> tuple[str, object]:
    return entry.name, _times(entry.stat())


def _times(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes with the content of a file, also if its time is set back."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _content(value: Any) -> Iterator[object]:
    """Yield what distinguishes a value, without addresses of memory. Raises TypeError if that is unknown."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum, re.Pattern, Logger)):
        yield repr(value)
        if isinstance(value, str) and "/" in value:
            yield from _files(value)
    elif isinstance(value, Path):
        yield str(value)
        yield from _files(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects")
        yield value.dtype.str, value.shape
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _content(pair)
    elif isinstance(value, (tuple, list)):
        yield len(value)
        for each in value:
            yield from _content(each)
    elif isinstance(value, (set, frozenset)):
        yield sorted(repr(list(_content(each))) for each in value)
    elif isinstance(value, partial):
        yield from _content((value.func, value.args, value.keywords))
    elif isinstance(value, (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)):
        yield getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__)
        if isinstance(value, FunctionType):  # the code itself is in a file, where several functions may have this name
            code, cells = value.__code__, tuple(each.cell_contents for each in value.__closure__ or ())
            yield code.co_firstlineno, code.co_code, code.co_names
            yield [repr(each) for each in code.co_consts if not isinstance(each, (CodeType, frozenset))]
            yield from _content((cells, value.__defaults__, value.__kwdefaults__))
        elif isinstance(value, MethodType):
            yield from _content((value.__func__, value.__self__))
        elif isinstance(value, BuiltinFunctionType):
            yield from _content(value.__self__)
    elif isinstance(value, Named):
        yield value.identity
    else:
        names = [each.name for each in fields(value)] if is_dataclass(value) else sorted(vars(value))
        if "_wrapped" in names:  # a guard of a plugin's object, whose wrapped methods only count calls
            names = ["_owner", "_wrapped"]
        for name in names:
            yield name
            yield from _content(getattr(value, name))


def _read(file: Path) -> Any:
    """Return the result in a file. Raises ValueError if the file is not what `_write` wrote, and OSError."""
    data = read_regular(file, MOST_BYTES, file.parent)
    digest, content = data[: sha256().digest_size], data[sha256().digest_size :]
    if sha256(content).digest() != digest:
        raise ValueError("its content has another hash")
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        return _unpacked(json.loads(arrays["plain"].tobytes()), arrays)


def _write(file: Path, result: object) -> None:
    """Write a result, so that readers see all of it or nothing. Raises OSError, and TypeError for other records."""
    arrays = dict[str, Any]()
    arrays["plain"] = np.frombuffer(json.dumps(_packed(result, arrays)).encode(), dtype=np.uint8)
    if sum(array.nbytes for array in arrays.values()) > MOST_BYTES - (1 << 20):
        return
    content = BytesIO()
    np.savez(content, **arrays)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as draft:
        try:
            draft.write(sha256(content.getbuffer()).digest())
            draft.write(content.getbuffer())
            draft.flush()
            os.replace(draft.name, file)
        except OSError:
            os.unlink(draft.name)
            raise


def _packed(value: Any, arrays: dict[str, Any]) -> Any:
    """Return a value as JSON. Arrays are numbered, and put into `arrays`."""
    if isinstance(value, np.ndarray):
        arrays[name := f"array{len(arrays)}"] = value
        return {"array": name}
    kind = type(value)
    if RECORDS.get(kind.__name__) is kind:
        return {kind.__name__: {each.name: _packed(getattr(value, each.name), arrays) for each in fields(kind)}}
    if isinstance(value, Mapping):
        return {"mapping": {name: _packed(each, arrays) for name, each in value.items()}}
    return [_packed(each, arrays) for each in value] if isinstance(value, (tuple, list)) else value


def _unpacked(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(each, arrays) for each in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    found = {name: _unpacked(each, arrays) for name, each in content.items()}
    return found if kind == "mapping" else RECORDS[kind](**found)


def _tidy(folder: Path) -> None:
    """Remove files that were not used for long, and the ones that were used first if there are too many."""
    total, oldest = 0, time.time() - MOST_DAYS * 86400
    files = sorted(((each.stat(), each.path) for each in os.scandir(folder)), key=lambda pair: -pair[0].st_mtime)
    for number, (status, path) in enumerate(files):
        total += status.st_size
        if total > ALL_BYTES or number >= ALL_FILES or status.st_mtime < oldest:
            os.unlink(path)
