"""Prints the devices and packages of a host as JSON: `python -m flagcore.api.hardware.host_report`."""

from __future__ import annotations

import json
from dataclasses import asdict

from flagcore.api.common.inputs import loaded_plugins
from flagcore.api.hardware.inspection import doctor


def host_report() -> dict[str, object]:
    """Return the devices of this machine, and the version of each package that an engine needs and that is here."""
    with loaded_plugins(()) as loaded:
        devices = [asdict(device) for device in loaded.devices()]
    return {"devices": devices, "versions": {each["name"]: each["version"] for each in doctor() if each["version"]}}


if __name__ == "__main__":
    print(json.dumps(host_report()))
