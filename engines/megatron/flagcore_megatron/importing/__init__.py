"""Converts Megatron's arguments to the sections of a spec."""
