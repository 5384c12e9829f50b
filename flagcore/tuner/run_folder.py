"""The run directory. One process locks it, and it belongs to one task."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from flagcore.domain.files import read_regular, writable, write
from flagcore.domain.secrets import redact_data
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import RunError
from flagcore.i18n import _
from flagcore.tuner.journal import JOURNAL

LOCK, IDENTITY = "run.lock", "task.json"
FOLDERS = ("trials", "best")
"""The folders in the folder of a run, which must not be links to other places."""


class RunDirectory:
    """A folder that one process locks. The kernel releases the lock when the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def open(self, *, new: bool = False) -> None:
        """Create and lock the folder. With `new`, an earlier run is renamed first.

        Raises RunError if the folder cannot be written, if another process has locked it, or if a folder in it is a
        link.
        """
        self._acquire_lock()
        if new and any((self.path / name).exists() for name in (IDENTITY, JOURNAL)):
            self.close()
            self._rename_earlier_run()
            self._acquire_lock()
        for folder in (self.path / name for name in FOLDERS if (self.path / name).is_symlink()):
            self.close()
            raise RunError(_("{folder} is a link; remove it, or use --run-dir for another folder", folder=folder))

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def identity(self) -> dict[str, Any] | None:
        """Return the stored identity of this run, or None if nothing is stored.

        The identity contains `run`, the unique name of the run, and `task` and `fixed` as `claim` stored them. Secrets
        in the task are redacted, so that a new token does not change the task. Raises RunError if the file cannot be
        read.
        """
        file = self.path / IDENTITY
        try:
            stored = json.loads(read_regular(file, folder=self.path))
            fixed = dict(stored["fixed"])
            dict(fixed.get("baseline") or {})
            ClusterSpec().with_measured(fixed.get("network") or {})
            if not isinstance(fixed.get("storage") or "", str):
                raise ValueError(f"fixed.storage = {fixed['storage']!r} must be a string")
            task = dict(stored["task"])
            int(dict(task.get("hardware") or {}).get("devices_per_node", 1))
            return {"run": str(stored["run"]), "task": redact_data(task), "fixed": fixed}
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(_("{file} cannot be read ({why}); use --new to start over", file=file, why=error)) from None

    def claim(self, task: Mapping[str, object], fixed: Mapping[str, object]) -> str:
        """Store the identity of this run, and return its unique name.

        `task` and `fixed` are plain JSON data. `task` must be the same in all calls; `fixed` is stored by the first
        call. Raises RunError with the differences if the folder belongs to another task, and if it has trials but no
        identity.
        """
        identity = self.identity()
        if identity is None and any((self.path / name).exists() for name in (JOURNAL, "trials")):
            raise RunError(_("{file} is missing; restore it, or use --new to start over", file=self.path / IDENTITY))
        requested = {"task": redact_data(json.loads(json.dumps(task))), "fixed": json.loads(json.dumps(fixed))}
        if identity is None:
            identity = {"run": f"{self.path.resolve().name}-{uuid4().hex[:12]}", **requested}
            text = json.dumps(identity, indent=2, sort_keys=True, ensure_ascii=False)
            write(self.path / IDENTITY, text, private=True)
        changes = list(differences(identity["task"], requested["task"]))
        if changes:
            omitted = [_("and {count} more", count=len(changes) - 8)] if len(changes) > 8 else []
            changes_text = "; ".join([*changes[:8], *omitted])
            raise RunError(
                _(
                    "{path} belongs to another task: {changes}. Use --new to start over (the old run is moved aside), "
                    "or --run-dir for another folder",
                    path=self.path,
                    changes=changes_text,
                )
            )
        return str(identity["run"])

    def _rename_earlier_run(self) -> None:
        """Append a timestamp to the name of the folder, and a number if that name exists."""
        name = f"{self.path.resolve().name}.{time.strftime('%Y%m%d-%H%M%S')}"
        target = self.path.resolve().with_name(name)
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{name}-{number}")
        with writable(self.path):
            self.path.resolve().rename(target)

    def _acquire_lock(self) -> None:
        """Create the folder and lock it. Raises RunError if another process has locked it."""
        with writable(self.path):
            self.path.resolve().mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 200).decode(errors="replace").strip()
            os.close(lock)
            text = _("{path} is in use by another process ({holder})", path=self.path, holder=holder or "?")
            raise RunError(text) from None
        self._lock = lock
        with writable(self.path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename} since {time.ctime()}".encode(), 0)


def differences(old: object, new: object, key: str = "") -> Iterator[str]:
    """Yield a line `key: old -> new` for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key}: {_short(old)} -> {_short(new)}"


def _short(value: object) -> str:
    json_text = json.dumps(value, ensure_ascii=False)
    return json_text if len(json_text) <= 60 else json_text[:57] + "..."
