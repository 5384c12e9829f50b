"""The engines that flagcore tunes."""
