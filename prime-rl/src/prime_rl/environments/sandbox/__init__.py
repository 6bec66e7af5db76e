"""A sandbox for untrusted programs: no network, only the standard library's files, limited time and memory."""
