"""The trial program: starts the servers of one candidate, sends the load, writes the measurements, and stops them."""
