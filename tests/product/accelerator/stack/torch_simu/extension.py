"""Loads the C++ part of torch_simu from the folder in the variable SIMU_BUILD."""

import importlib.util
import os
from types import ModuleType


def _load() -> ModuleType:
    path = os.path.join(os.environ["SIMU_BUILD"], "torch_simu_c.so")
    spec = importlib.util.spec_from_file_location("torch_simu_c", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extension = _load()
