"""Asks judges for environments: one gateway per run, with limits, retries, a cache, counters and a named failure."""
