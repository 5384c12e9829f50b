"""Tests of the whole product: engines, vendors' plugins and extras together. Without an engine they are skipped."""

from importlib.util import find_spec

import pytest

from tests.plugins.conftest import install as install
from tests.spec.conftest import error_of as error_of

ENGINES = ("llamacpp", "lmdeploy", "megatron", "serving", "sglang", "trainers", "training", "vllm")
if missing := [f"flagcore-{name}" for name in ENGINES if find_spec(f"flagcore_{name}") is None]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)
