"""Kinds of feed-forward networks. Each module is one kind."""
