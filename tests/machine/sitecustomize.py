"""Fixes the machine in a Python process that a test starts, after the `sitecustomize` that is next on the path."""

import os
import sys

_here = os.path.dirname(os.path.realpath(__file__))
for _folder in sys.path:
    _next = os.path.join(_folder, "sitecustomize.py")
    if os.path.realpath(_folder) != _here and os.path.isfile(_next):
        with open(_next, encoding="utf-8") as _file:
            exec(compile(_file.read(), _next, "exec"), {"__name__": "sitecustomize", "__file__": _next})
        break
import fixed_machine  # noqa: E402, F401
