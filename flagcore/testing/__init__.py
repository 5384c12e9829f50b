"""The conformance kit: what a plugin promises, as checks for `flag plugins check` and as tests for pytest.

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
    from flagcore.testing.without_tool import WithoutTool

__all__ = ["PluginConformance", "WithoutTool"]
PLACES = {"PluginConformance": "flagcore.testing.conformance", "WithoutTool": "flagcore.testing.without_tool"}


def __getattr__(name: str) -> object:
    """Import a class of tests when it is asked for, with its assertions telling their values; checks need no pytest."""
    if name not in PLACES:
        raise AttributeError(name)
    import pytest

    pytest.register_assert_rewrite(PLACES[name])
    return getattr(import_module(PLACES[name]), name)
