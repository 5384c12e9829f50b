"""Requests as clients send them: prompts, arrivals, the client, and what is measured of the answers."""
