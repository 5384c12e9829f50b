"""The tools, called by the client of the library over stdin and stdout, as an agent does."""

import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from flagcore_mcp import server
from flagcore_mcp.server import TOOLS
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

EXAMPLE = Path(__file__).parents[3] / "examples" / "train-cpu.yaml"
BY_NAME = {each.name: each for each in TOOLS}


def with_client(folder: Path, talk: Callable[[Client], Awaitable[Any]]) -> Any:
    """Return what `talk` returns for a client of a server in `folder`, which has the example."""
    shutil.copy(EXAMPLE, folder / "train.yaml")
    start = ["-c", "from flagcore.cli import main; main()", "mcp"]
    variables = {**os.environ, "HOME": str(folder)}
    parameters = StdioServerParameters(command=sys.executable, args=start, cwd=folder, env=variables)

    async def session() -> Any:
        with open(folder / "errors.log", "w") as errors:
            async with Client(stdio_client(parameters, errlog=errors)) as client:
                return await talk(client)

    return anyio.run(session)


@pytest.mark.costly
def test_an_agent_plans_and_exports(tmp_path: Path) -> None:
    async def talk(client: Client) -> Any:
        calls = (
            ("estimate", {"spec": "train.yaml", "top": 2, "set": ["train.global_batch_size=32"]}),
            ("export", {"spec": "train.yaml", "candidate": ["baseline"], "to": "megatron", "output": "out"}),
            ("estimate", {"spec": "none.yaml"}),
            ("run", {"run": "runs/x"}),
        )
        return await client.list_tools(), *[await client.call_tool(*each) for each in calls]

    listed, plan, exported, refused, unknown = with_client(tmp_path, talk)
    assert {each.name for each in listed.tools} == BY_NAME.keys()
    assert len(plan.structured_content["result"]) == 2
    assert json.loads(plan.content[0].text) == plan.structured_content
    assert all((tmp_path / file).is_file() for file in exported.structured_content["result"])
    assert refused.is_error
    assert "\nflag: none.yaml: file does not exist" in "\n" + refused.content[0].text
    assert unknown.is_error
    assert "no tool 'run'" in unknown.content[0].text


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_agent_tunes(tmp_path: Path) -> None:
    """A search that is cancelled leaves no process, and the same call resumes it."""
    arguments = {"spec": "patient.yaml", "run_dir": "run", "max_trials": 2, "time": "25min"}
    patient = EXAMPLE.read_text("utf-8").replace("max_time_per_task: 150", "max_time_per_task: 700\n    repeats: 0")
    (tmp_path / "patient.yaml").write_text(patient.replace("num_layers: 4", "num_layers: 1"))

    async def talk(client: Client) -> Any:
        async def progress(count: float, total: float | None, message: str | None) -> None:
            if "trial 0" in (message or ""):
                scope.cancel()

        planned = await client.call_tool("estimate", {"spec": "train.yaml", "top": 1})
        with anyio.CancelScope() as scope:
            await client.call_tool("tune", arguments, progress_callback=progress)
        resumed = await client.call_tool("tune", arguments)
        shown = await client.call_tool("show_run", {"run": "run"})
        return (
            scope,
            planned,
            resumed,
            shown,
            await client.call_tool("export", {"spec": "run", "to": "megatron", "output": "out"}),
        )

    scope, planned, resumed, shown, exported = with_client(tmp_path, talk)
    assert scope.cancelled_caught
    assert len(planned.structured_content["result"]) == 1
    assert not resumed.is_error, resumed.content[0].text
    assert resumed.structured_content["result"] == shown.structured_content["result"]
    assert resumed.structured_content["result"]["counts"]["measured"] == 2
    assert all((tmp_path / file).is_file() for file in exported.structured_content["result"])
    assert not [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]


@pytest.mark.slow
def test_a_cancelled_call_interrupts_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
import sys, time
try:
    print("begins", file=sys.stderr, flush=True)
    time.sleep(60)
finally:
    print("x" * 10**6)
    open({str(tmp_path / "ended")!r}, "w").close()
"""
    monkeypatch.setattr(server, "START", script)

    async def cancelled() -> None:
        async def progress(count: float, total: float | None, message: str) -> None:
            scope.cancel()

        with anyio.CancelScope() as scope:
            await server.run([], progress)
        assert scope.cancelled_caught

    anyio.run(cancelled)
    assert (tmp_path / "ended").exists()


def test_a_tool_takes_what_its_command_takes() -> None:
    words = BY_NAME["estimate"].command_line({"spec": "--help", "top": 3, "all": True, "set": "a=-b"})
    assert words == ["estimate", "--json", "--set=a=-b", "--top=3", "--all", "--", "--help"]
    assert BY_NAME["runs"].command_line({}) == ["runs", "list", "--json", "--"]
    schema = BY_NAME["estimate"].input_schema()
    assert (schema["properties"]["top"]["type"], schema["properties"]["top"]["minimum"]) == ("integer", 1)
    assert schema["properties"]["rate"]["type"] == ["number", "string"]  # also "auto"
    assert BY_NAME["show_run"].input_schema()["required"] == ["run"]
    assert {each.name for each in TOOLS if each.writes} == {"tune", "export"}


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("estimate", {"report": "page.html"}, "estimate has no argument 'report'"),
        ("estimate", {"spec": [["train.yaml"]]}, r"spec = \['train.yaml'\]: expected text or a number"),
        ("estimate", {"all": "yes"}, "all = 'yes': expected true or false"),
        ("estimate", {"top": True}, "top = True: expected text or a number"),
        ("estimate", {"spec": "a\0b"}, "expected text or a number"),
        ("tune", {"set": ["train.command=id"]}, "tune has no argument 'set'"),
        ("export", {"output": "-"}, "expected a folder"),
    ],
)
def test_other_arguments_are_refused(tool: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BY_NAME[tool].command_line(arguments)


def test_a_line_without_end_ends_the_input() -> None:
    lines = server._Lines(BytesIO(b"{}\n" + b"x" * (server.MOST_LINE + 1)))
    assert [lines.readline(), lines.ended, lines.readline(), lines.ended] == ["{}\n", False, "", True]
