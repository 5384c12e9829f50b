"""Formulas for the memory and the time of transformers, in SI units."""
