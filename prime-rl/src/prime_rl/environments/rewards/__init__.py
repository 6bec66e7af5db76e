"""Reward functions by registry name or dotted path, each run in a worker process with a time limit."""
