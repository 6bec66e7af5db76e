"""Agents and workflows as environments: what user code gets, and how its results are read."""
