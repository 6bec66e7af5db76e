"""Rewards that compare what a completion says with an answer."""
