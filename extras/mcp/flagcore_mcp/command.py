"""flag mcp."""

import click


@click.command("mcp")
def mcp_command() -> None:
    """Serve the commands that plan, tune and export to an agent, by the Model Context Protocol on stdin and stdout.

    The agent starts this command itself. Paths are relative to the folder in which it starts.
    """
    from flagcore_mcp.server import serve

    serve()
