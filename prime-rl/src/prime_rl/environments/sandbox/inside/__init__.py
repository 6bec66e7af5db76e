"""The programs inside the sandbox. Standard library only: they start as scripts, without the `prime_rl` package."""
