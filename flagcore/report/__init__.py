"""Formats plans and predictions as text and plain data. It knows neither the terminal nor click."""
