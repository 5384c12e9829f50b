"""Reads specs and job records from YAML or JSON, and converts them to dataclasses of `flagcore.domain`.

Invalid input raises `SpecError`, which lists all problems of a file.
"""
