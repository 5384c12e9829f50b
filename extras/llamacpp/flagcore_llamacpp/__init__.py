"""The llama.cpp server."""
