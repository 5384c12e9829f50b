"""Watchers: the events of a search that other tools receive while it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread
from typing import Any

from flagcore import plugins
from flagcore.api.notes import warn
from flagcore.contracts import Event
from flagcore.domain.secrets import redact_data, secrets_in_data
from flagcore.domain.spec import Task
from flagcore.domain.trial import RUN_FINISHED, RUN_STARTED, TRIAL_FINISHED, TRIAL_STARTED, RunEvent
from flagcore.i18n import N_, _
from flagcore.loading.entry_points import one_line
from flagcore.report.result import TrialResult

MAX_SECONDS = 30.0
"""A watcher that takes longer for an event gets no more events. At its end, a run waits this long for all watchers."""


class Watchers(AbstractContextManager["Watchers"]):
    """The watchers of one run, by name.

    Raises SpecError or NoDevice if a watcher is not installed or cannot be loaded.
    """

    def __init__(self, names: Collection[str], max_seconds: float = MAX_SECONDS) -> None:
        calls = {name: plugins.watcher(name) for name in names}
        self._watchers = [_Watcher(name, call, max_seconds) for name, call in calls.items()]
        self._max_seconds = max_seconds
        self._about: dict[str, Any] = {}
        self._secrets: list[str] = []

    def begin(self, run: str, folder: str, task: Task, spec: Mapping[str, Any]) -> None:
        """Send the start of a run to all watchers. `spec` is its data, whose secrets are removed from all events."""
        if not self._watchers:
            return
        work = task.spec.work
        job = {
            "engine": work.engine,
            "kind": plugins.kind_of(work.engine),
            "model": task.spec.model.name,
            "chip": task.cluster.chips,
            "devices": task.cluster.devices,
            "objective": task.spec.objective,
            "fidelity": task.spec.control.fidelity,
        }
        self._secrets = [*secrets_in_data(os.environ), *secrets_in_data(spec)]
        self._about = {"run": run, "folder": folder, "job": job}
        self._send(kind=RUN_STARTED)

    def on_event(self, event: Event) -> None:
        """Send the start or the end of a trial to all watchers."""
        if self._about and event.kind in (TRIAL_STARTED, TRIAL_FINISHED):
            best = TrialResult.write(event.best) if event.best else None
            self._send(kind=event.kind, trial=TrialResult.write(event.trial), best=best)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Send the end of the run to all watchers, only once."""
        if self._about:
            self._send(kind=RUN_FINISHED, best=(result or {}).get("best"), result=result)
            self._about = {}

    def __exit__(self, *error: object) -> None:
        self.finish(None)
        end = time.monotonic() + self._max_seconds
        for watcher in self._watchers:
            watcher.close(end)

    def _send(self, **fields: Any) -> None:
        fields = redact_data({**self._about, **fields}, self._secrets)
        event = RunEvent(time=time.time(), **fields)
        for watcher in self._watchers:
            watcher.send(event)


class _Watcher:
    """Calls a watcher in a thread, with one event after the other."""

    def __init__(self, name: str, call: Callable[[RunEvent], object], max_seconds: float) -> None:
        self._name, self._call, self._max_seconds = name, call, max_seconds
        self._events: SimpleQueue[RunEvent | None] = SimpleQueue()
        self._began: float | None = None
        self._stopped = False
        self._thread = Thread(target=self._run, daemon=True, name=f"watcher {name}")
        self._thread.start()

    def send(self, event: RunEvent) -> None:
        """Queue an event, unless the watcher has hung."""
        began = self._began
        if began is not None and time.monotonic() - began > self._max_seconds:
            self._stop()
        if not self._stopped:
            self._events.put(event)

    def close(self, end: float) -> None:
        """Wait until all events are handled, at most until the time `end`."""
        self._events.put(None)
        if not self._stopped:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                self._stop()

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            text = N_("watcher {name} receives no more events, because it took longer than {seconds} s for one event")
            warn([_(text, name=self._name, seconds=f"{self._max_seconds:g}")])

    def _run(self) -> None:
        reported = set()
        while (event := self._events.get()) is not None and not self._stopped:
            self._began = time.monotonic()
            try:
                self._call(event)
            except BaseException as error:
                reason = one_line(error)
                if reason not in reported:
                    reported.add(reason)
                    warn([_("watcher {name} failed: {reason}", name=self._name, reason=reason)])
            self._began = None
