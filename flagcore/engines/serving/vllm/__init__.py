"""The vLLM server."""
