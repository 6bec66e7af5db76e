"""Starts a run again after a failure, and tells who starts it."""
