"""What users of AReaL write: `allocation_mode`, `launcher` and `recover`, as another way to set our own keys."""
