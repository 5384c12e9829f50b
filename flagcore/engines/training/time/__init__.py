"""Time of a training step.

`step.py` predicts every part of a step, with `pipeline.py` for the schedule. `pace.py` is its fast path: the seconds of
one stage by its number of layers, which the search for splits needs thousands of times. Both give the same seconds.
"""
