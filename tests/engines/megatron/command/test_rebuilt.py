"""The table of arguments against the parser of a real Megatron-LM."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from flagcore.engines.megatron.command.arguments import argument_spec, release_table

ENVIRONMENT = os.environ.get("REAL_MEGATRON", "")
TOOL = Path(__file__).parents[4] / "tools" / "megatron_arguments.py"


@pytest.mark.long
@pytest.mark.skipif(
    not ENVIRONMENT, reason="needs REAL_MEGATRON, a virtual environment with torch and flag-scale 0.8.0"
)
def test_flagscales_parser_has_the_arguments_of_its_table() -> None:
    (wheel,) = Path(ENVIRONMENT, "lib").glob("python3*/site-packages/flag_scale")
    tree = wheel / "third_party" / "Megatron-LM"
    run = subprocess.run(
        [Path(ENVIRONMENT, "bin", "python"), TOOL, "--read", tree],
        env=os.environ | {"PYTHONPATH": f"{tree}:{wheel}", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    rows = json.loads(run.stdout.splitlines()[-1]).values()
    specs = [argument_spec(row) for row in rows]
    assert {flag: spec for spec in specs for flag in spec.flags} == dict(release_table("0.15.0+flagscale").by_flag)
