"""The JSON Schema of examples/spec.schema.json, from the engines of this repository."""

import json
from pathlib import Path

from flagcore.plugins import WORKLOADS, engines
from flagcore.plugins.entry_points import installed, origin
from flagcore.spec.serving import json_schema

ROOT = Path(__file__).parents[2]
FILE, ENGINES = ROOT / "examples" / "spec.schema.json", ROOT / "engines"


def schema() -> str:
    """Return the JSON Schema of a spec without engines of other distributions that are installed here."""
    own = {f"flagcore-{folder.name}" for folder in ENGINES.iterdir()}
    points = installed(WORKLOADS)
    own_names = {name for name, each in points.items() if {origin(point).name for point in each} <= own}
    found = engines()
    return json.dumps(json_schema({name: found[name] for name in sorted(own_names & found.keys())}), indent=2) + "\n"
