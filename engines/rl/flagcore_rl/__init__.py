"""Reinforcement learning as a kind of job: a trainer and the rollout that generates its samples."""
