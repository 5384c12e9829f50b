"""Requests as clients send them: prompts, arrivals, the client, and measurements."""
