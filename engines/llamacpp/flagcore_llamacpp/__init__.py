"""The llama.cpp server."""

SDK = ("profile",)
