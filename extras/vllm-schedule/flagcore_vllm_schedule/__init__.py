"""The installed vLLM as an oracle: what it refuses, and how its own scheduler serves a load."""
