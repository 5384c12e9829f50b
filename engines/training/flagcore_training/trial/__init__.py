"""What trial programs share: the job that they read, how they start, end and report, their ranks and their devices."""
