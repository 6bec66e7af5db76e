"""Environments and their parts: rows, reward functions, judges, a sandbox for code, adapters, agents."""
