"""The program of `flag calibrate`, which measures kernels and collectives with torch in separate processes.

It is started as `python -m flagcore.microbench JOB.json`. No other part of flagcore imports it.
"""
