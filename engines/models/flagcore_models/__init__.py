"""Models: what config.json and GGUF files describe, public models by name, and kinds of layers."""

SDK = ("config", "formats", "gguf", "keys", "layers", "mixers", "networks", "parts", "public")
