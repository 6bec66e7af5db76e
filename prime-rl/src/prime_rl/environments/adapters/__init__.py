"""Environments made of other packages' tasks."""
