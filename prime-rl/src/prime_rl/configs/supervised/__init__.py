"""Sections of an SFT run: how rows are read, and evaluation during training."""
