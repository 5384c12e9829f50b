"""Where trials run: each launcher starts one, waits for it and ends it."""
