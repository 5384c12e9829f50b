"""The SGLang server."""
