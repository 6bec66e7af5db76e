"""Looks at an environment without a model: its dataset, and what its rewards give for scripted answers."""
