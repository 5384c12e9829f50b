"""The ray launcher."""
