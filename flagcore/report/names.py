"""The names of figures and the columns of tables in `names.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

NAMES: dict[str, dict[str, str]]
COLUMNS: dict[str, dict[str, str]]
"""By table: the headings of columns, and dotted keys of a record."""

_DATA: Any = yaml.safe_load(files(__package__).joinpath("names.yaml").read_text(encoding="utf-8"))
COLUMNS = _DATA.pop("columns")
NAMES = _DATA
