"""The split of layers over pipeline stages."""
