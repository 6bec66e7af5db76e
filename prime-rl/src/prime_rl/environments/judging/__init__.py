"""LLM judges for environments: one gateway per run, with rate limits, retries, a cache and counters."""
