"""The load client: generates requests, sends them to servers, and measures the answers."""
