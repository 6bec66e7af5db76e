"""Finds processes that make no progress, and shows what they were doing."""
