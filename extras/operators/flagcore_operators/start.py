"""What torch calls at the end of `import torch`, in every program of an environment with this distribution.

Without one of the two variables, it does nothing. torch calls the entry points of its group `torch.backends` since 2.5.
"""

import os

SET = "FLAGCORE_OPERATORS"
"""LIBRARY:OPERATOR=IMPLEMENTATION,...: the choice that the program applies, for libraries without own variables."""
RECORD = "FLAGCORE_OPERATORS_RECORD"
"""LIBRARY:FOLDER: the calls of the library's operators are recorded in files of the folder."""


def start() -> None:
    """Apply a choice, and begin to record calls, as the variables say."""
    if SET in os.environ:
        from flagcore_operators.contract import find_library, read_choice

        name, _, text = os.environ[SET].partition(":")
        find_library(name).apply(read_choice(text))
    if RECORD in os.environ:
        from flagcore_operators.contract import find_library
        from flagcore_operators.recorder import record

        name, _, folder = os.environ[RECORD].partition(":")
        record(find_library(name), folder)


def effective() -> dict[str, str]:
    """Return the value of the knob whose choice this program applied, or the implementations that ran instead."""
    name = os.environ.get(SET, "").partition(":")[0]
    if not name:
        return {}
    from flagcore_operators.contract import find_library

    others = find_library(name).others()
    return {f"{name}_operators": ",".join(f"{each}={ran}" for each, ran in others.items()) or "calibrated"}
