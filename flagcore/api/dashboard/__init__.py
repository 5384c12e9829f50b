"""`flag dashboard`: running and finished runs in a browser."""
