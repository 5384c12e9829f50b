"""The llama.cpp server."""

SDK = ("engine",)
