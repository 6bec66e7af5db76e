"""Reward functions by registered name or path, called in worker processes with a time limit."""
