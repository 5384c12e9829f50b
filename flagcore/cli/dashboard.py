"""flag dashboard: runs in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from flagcore.cli import options
from flagcore.i18n import _


@click.command("dashboard")
@click.argument("runs", type=click.Path(path_type=Path), default="runs")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1 [default: a free one].")
@options.plugins
def dashboard_command(runs: Path, port: int, without: tuple[str, ...]) -> None:
    """Show the running and the finished runs in the folder RUNS [default: runs] in a browser.

    The URL, which contains a secret token, is printed. The server listens on 127.0.0.1 only, serves nothing but these
    runs, and changes nothing. Requires the extra `dashboard`. From another machine, forward the port:
    `ssh -L PORT:127.0.0.1:PORT HOST`.
    """
    from flagcore.api.dashboard.server import dashboard

    server = dashboard(runs, port=port, without=without)
    click.echo(server.url)
    options.say(_("flag: end with Ctrl-C"))
    try:
        server.serve()
    finally:
        server.close()
