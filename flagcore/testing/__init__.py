"""The conformance kit: what a plugin promises, as tests that its author subclasses. Needs pytest.

```python
from flagcore.testing import PluginConformance
from flagcore_acme import hooks

class TestAcme(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagcore.testing.conformance import PluginConformance
    from flagcore.testing.shipped import ShippedData

__all__ = ["PluginConformance", "ShippedData"]
PLACES = {"PluginConformance": "flagcore.testing.conformance", "ShippedData": "flagcore.testing.shipped"}


def __getattr__(name: str) -> object:
    """Import a part of the kit when it is asked for, with its assertions telling their values."""
    if name not in PLACES:
        raise AttributeError(name)
    import pytest

    pytest.register_assert_rewrite(PLACES[name])
    return getattr(import_module(PLACES[name]), name)
