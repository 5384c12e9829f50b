"""The lists of FlagScale's keys and defaults in `tables.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

TABLES: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("tables.yaml").read_text(encoding="utf-8"))
