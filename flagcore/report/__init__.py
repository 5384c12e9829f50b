"""Plans and predictions as text and plain data. Knows neither the terminal nor click."""
