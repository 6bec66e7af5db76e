"""Python interpreters and directories of environments that the run's own interpreter does not hold."""
