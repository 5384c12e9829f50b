"""Reads regular files that other programs wrote, replaces files atomically, and finds flagcore's data folder."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flagcore.errors import RunError
from flagcore.i18n import _

LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Characters that are half of a pair, which JSON can contain and UTF-8 cannot."""
HOME_VARIABLE = "FLAGCORE_HOME"
"""The environment variable that names the folder in which flagcore stores data between runs."""
HOME_FIX = f"set {HOME_VARIABLE} to a folder that can be written"


def data_folder() -> Path:
    """Return the folder in which flagcore stores data between runs.

    It is FLAGCORE_HOME if that is set, else the folder `flagcore` in XDG_DATA_HOME or ~/.local/share.
    """
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home)
    shared = os.environ.get("XDG_DATA_HOME", "")
    data = Path(shared) if os.path.isabs(shared) else Path(os.path.expanduser("~")) / ".local" / "share"
    return data / "flagcore"


def open_regular(path: Path | str, folder: Path | None = None) -> BinaryIO:
    """Open a regular file for reading bytes, without blocking. Raises OSError, also for a pipe, device or folder.

    `folder`: the folder of a run, which may come from someone else. A link that leaves it, and another user's file with
    several hard links, are refused.
    """
    if folder and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise OSError(errno.ELOOP, "it is a link to a place outside the folder", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    is_foreign = folder and status.st_nlink > 1 and status.st_uid != os.stat(folder).st_uid
    if is_foreign or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        reason = "it is a hard link to a file of another user" if is_foreign else "it is not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path | str, max_bytes: int = 64 << 20, folder: Path | None = None) -> bytes:
    """Return the content of a regular file. Raises OSError, also if it is larger than `max_bytes`.

    `folder`: see `open_regular`.
    """
    with open_regular(path, folder) as file:
        return read_all(file, min(max_bytes, os.fstat(file.fileno()).st_size + (1 << 22)))  # it may grow


def read_all(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the rest of a file, pipe or device. Raises OSError if it is larger than `max_bytes`."""
    if len(data := file.read(max_bytes + 1)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes")
    return data


def replace(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically, so that readers see either the old or the new content. Raises OSError.

    A link is replaced, not followed.

    `private`: whether only the owner can read the file.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600 if private else 0o666, exist_ok=False)
        draft.write_text(LONE.sub("\N{REPLACEMENT CHARACTER}", text), encoding="utf-8", errors="surrogateescape")
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def writable(path: Path, fix: str = "") -> Iterator[None]:
    """Convert an OSError in this context to a RunError about `path`.

    `fix`: the advice to the user in the error. The default is to use another folder for the run. If the disk is full,
    the advice is to free space.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            saved = _("free some space and start again; finished trials are saved")
            fix = _("free some space and start again") if fix else saved
        fix, reason = fix or _("use --run-dir for another folder"), error.strerror or error
        raise RunError(_("{file} cannot be written: {why}; {fix}", file=path, why=reason, fix=fix)) from None


def write(file: Path, text: str, *, private: bool = False, fix: str = "") -> None:
    """Write a text file of a run atomically. Raises RunError, with the advice `fix`, if it cannot be written."""
    with writable(file, fix):
        replace(file, text, private=private)


def save(file: Path, text: str, *, private: bool = False) -> None:
    """Write a text file below the data folder atomically. Raises RunError if it cannot be written."""
    with writable(file, HOME_FIX):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, text, private=private)
