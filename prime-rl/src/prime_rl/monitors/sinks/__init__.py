"""Sinks that users turn on: each logs one run to one program, through one protocol (`Monitor`)."""
