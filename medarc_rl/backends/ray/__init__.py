"""Runs on a Ray cluster: a driver places an agent on each node, and supervises what they run."""
