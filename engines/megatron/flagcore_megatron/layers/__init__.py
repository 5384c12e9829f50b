"""The splits of a model's layers over pipeline stages."""
