"""The program of `flag calibrate`: measures kernels and collectives with torch, in processes of its own.

Started as `python -m flagcore.microbench JOB.json`. Nothing else of flagcore imports it.
"""
