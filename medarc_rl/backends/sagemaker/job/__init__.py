"""Runs inside the training job."""
