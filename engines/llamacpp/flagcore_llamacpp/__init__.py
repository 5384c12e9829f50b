"""The llama.cpp server."""

SDK = ("flagcore_llamacpp.profile",)
