"""The trial program: trains a few steps of one configuration on this machine and writes its measurements.

Run it with `python -m flagcore_megatron.trial JOB.json`. Only the modules that run inside a rank import torch
and megatron.
"""
