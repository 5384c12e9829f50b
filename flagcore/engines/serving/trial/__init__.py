"""The trial program: starts the servers of one candidate, loads them, writes what it measured, and stops them."""
