"""Reads `engines.yaml`: how engines run on a vendor's chips, for those that train (`train`) and serve (`serve`).

Each of the two sections holds `device_type` (torch's name of the devices), `distributed_backend` (torch.distributed's
name), and optionally `works` (`true` or `false`; missing: untested), `reason`, `preload` (modules to import first),
`visible_devices` (an environment variable) and `shared_devices`. `flagcore.domain.engine.EngineSupport` explains them.
What is reported of single engines is in `quirks.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from flagcore.domain.chip import Support
from flagcore.domain.engine import EngineSupport
from flagcore.vendorkit.fields import Part, read_file
from flagcore.vendorkit.scope import KINDS

FILE = "engines.yaml"
SUPPORT = {True: Support.YES, False: Support.IMPOSSIBLE, None: Support.UNKNOWN}
"""What `works` in a file means."""


@cache
def read_engines(package: str) -> Mapping[str, EngineSupport]:
    """Return the support by kind of engine; empty without a file. Raises SpecError for a bad file."""
    parts = read_file(package, FILE, "a file of engines")
    if parts is None:
        return {}
    found = {kind: _support(part) for kind in KINDS if (part := parts.part(kind))}
    parts.finish(f"the sections are {' and '.join(KINDS)}")
    return found


def _support(part: Part) -> EngineSupport:
    support = EngineSupport(
        support=SUPPORT[part.optional("works", bool, None)],
        reason=part.optional("reason", str, ""),
        device_type=part.required("device_type", str),
        distributed_backend=part.required("distributed_backend", str),
        preload=tuple(part.listed("preload", str)),
        visible_devices=part.optional("visible_devices", str, None),
        shared_devices=part.optional("shared_devices", bool, False),
    )
    part.finish()
    return support
