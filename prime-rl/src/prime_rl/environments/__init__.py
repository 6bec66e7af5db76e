"""What environments are made of: reward functions, a sandbox for code, datasets."""
