"""Finds and loads the entry points of installed distributions, with time limits, so that a broken part ends no command.

Programs of trials and packages that do not ask plugins also use it, so it imports nothing outside the standard library
until a part is loaded.
"""
