"""Python interpreters that environments have for themselves."""
