"""Run the best servers until they, or this process, end."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError, UsageError
from flagcore.i18n import _
from flagcore.launchers.local import start_for_users

PERIOD_SECONDS = 0.5
ANSWER_SECONDS = 2.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def serve(launch: Launch, stdout: int, on_ready: Callable[[str], object]) -> int:
    """Run servers to their end and return their exit status, or 128 plus the number of the signal that ended them.

    `on_ready` is called with their URL once all of `launch.ready` respond with status 200. Raises UsageError if they
    cannot be started, or one of their ports is in use.
    """
    used_urls = [url for url in launch.ready if _listens(url)]
    if used_urls:
        port = urlsplit(used_urls[0]).port
        raise UsageError(_("port {port} is in use by another program", port=port))
    try:
        servers = start_for_users(launch, stdout, 2)
    except (LaunchError, OSError) as error:
        raise UsageError(str(error)) from None
    is_ready = False
    try:
        while (ended := servers.wait(PERIOD_SECONDS)) is None:
            if not is_ready and _responds(launch.ready):
                is_ready = True
                on_ready("{0.scheme}://{0.netloc}".format(urlsplit(launch.ready[0])))
    except BaseException:
        servers.stop()
        raise
    return ended.code if ended.code >= 0 else 128 - ended.code


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _responds(urls: Iterable[str]) -> bool:
    try:
        for url in urls:
            with DIRECT.open(url, timeout=ANSWER_SECONDS) as answer:
                if answer.status != 200:
                    return False
    except (OSError, ValueError):
        return False
    return True
