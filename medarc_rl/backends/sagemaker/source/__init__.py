"""The files that a job gets."""
