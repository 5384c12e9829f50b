"""Makes the trial program's speed test small: a simulated device has the speed of a core."""

import importlib.abc
import importlib.util
import sys


class _SmallSpeedTest(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "flagcore_training.trial.rank_device":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            module.ACCELERATOR_SIZE = module.SIZE["cpu"]

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, _SmallSpeedTest())
