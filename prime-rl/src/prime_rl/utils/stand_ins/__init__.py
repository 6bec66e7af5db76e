"""Stand-ins for modules that libraries import and a process may never use."""
