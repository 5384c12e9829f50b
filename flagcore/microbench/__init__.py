"""The program of `flag calibrate`: measures kernels and collectives with torch, in separate processes.

Started as `python -m flagcore.microbench JOB.json`. No other part of flagcore imports it.
"""
