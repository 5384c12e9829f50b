"""How servers are started, exported, and read from commands."""
