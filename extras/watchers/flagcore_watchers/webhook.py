"""Sends each event as JSON to the URL in FLAGCORE_WEBHOOK_URL, with one line of `text` that chat tools show."""

import json
import os
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from flagcore.domain.trial import RUN_FINISHED, TRIAL_FINISHED, RunEvent

URL = "FLAGCORE_WEBHOOK_URL"
TIMEOUT_SECONDS = 10.0


class _NoRedirect(HTTPRedirectHandler):
    """Treats a redirect as an error, because the event would be lost."""

    def redirect_request(self, *arguments: object, **named: object) -> None:
        return None


_OPENER = build_opener(_NoRedirect)


def on_event(event: RunEvent) -> None:
    """Post an event as JSON. Raises OSError if the server does not accept it, and ValueError if no URL is set."""
    url = os.environ.get(URL, "")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"set {URL} to the http(s) URL that takes the events")
    body = json.dumps({"text": text(event), **event.as_dict()}, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "flagcore"}
    with _OPENER.open(Request(url, data=body, headers=headers, method="POST"), timeout=TIMEOUT_SECONDS):
        pass


def text(event: RunEvent) -> str:
    """Return an event as one line of text."""
    words = [event.run, event.kind.replace("_", " ")]
    if event.trial:
        words.append(f"{event.trial['number']}: {event.trial['state']}")
    if event.best and event.kind in (TRIAL_FINISHED, RUN_FINISHED):
        rate = (event.best.get("measured") or {}).get("tokens_per_second_per_device")
        value = "" if rate is None else f", {rate:.4g} tokens/s/device"
        words.append(f"(best: trial {event.best['number']}{value})")
    return " ".join(words)
