"""Where environments run: in this process, behind a port, or in a process of their own."""
