"""What this process may use of its machine."""
