"""The conformance kit for plugins: checks for `flag plugins check`, and tests for pytest.

```python
from flagcore_testing import PluginConformance
from flagcore_acme import hooks

class TestAcme(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from flagcore_testing.conformance import PluginConformance

__all__ = ["PluginConformance"]

SDK = ("examples", "fakes", "package", "toy")


def __getattr__(name: str) -> object:
    """Import PluginConformance on first access, with assertions rewritten by pytest. The checks do not need pytest."""
    if name != "PluginConformance":
        raise AttributeError(name)
    import pytest

    pytest.register_assert_rewrite("flagcore_testing.conformance")
    from flagcore_testing.conformance import PluginConformance

    return PluginConformance


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark `device` in every pytest run, so that plugins need no pytest settings."""
    config.addinivalue_line("markers", "device: needs a real accelerator")
