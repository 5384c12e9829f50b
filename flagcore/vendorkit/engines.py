"""Reads `engines.yaml`: how training engines (`train`) and serving engines (`serve`) run on a vendor's chips.

Each section has `device_type` (torch's name of the devices), `distributed_backend` (torch.distributed's name), and
optionally `works` (`true` or `false`; missing: untested), `reason`, `preload` (modules to import first),
`visible_devices` (an environment variable), `shared_devices`, `implementation` (used in production),
`cross_vendor_libraries` (collective libraries that connect the chips with those of other vendors), `install` (the
origin of the vendor's builds) and `kubernetes` (the resource that a pod requests, with its source).
`flagcore.domain.engine.EngineSupport` explains them. Facts about single engines are in `quirks.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.vendorkit.fields import build, finish, read_file
from flagcore.vendorkit.scope import KINDS

FILE = "engines.yaml"
SUPPORT = {True: Support.YES, False: Support.IMPOSSIBLE, None: Support.UNKNOWN}
"""The support by the value of `works` in a file."""


@cache
def read_engines(package: str) -> Mapping[str, EngineSupport]:
    """Return the support by kind of engine; empty without a file. Raises SpecError for a bad file."""
    content, file = read_file(package, FILE) or {}, f"{package}/{FILE}"
    found = {}
    for kind in KINDS:
        if kind in content:
            section = build(dict[str, object], content.pop(kind), file, kind)
            works = build(bool | None, section.pop("works", None), file, f"{kind}.works")
            found[kind] = build(EngineSupport, {"support": SUPPORT[works].value, **section}, file, f"{kind}.")
    finish(content, file, f"the sections are {' and '.join(KINDS)}")
    return found
