"""Agents as environments: their code runs in a process of its own, and asks the model through the proxy."""
