"""The wrapper: decides where a run's processes go, starts them, and tells what happened."""
