"""Environments made of tasks and games of other packages."""
