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

from flagcore.testing.conformance import PluginConformance

__all__ = ["PluginConformance"]
