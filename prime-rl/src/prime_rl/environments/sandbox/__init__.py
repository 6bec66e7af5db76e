"""Runs programs that nobody has read: no network, no files but the standard library's, limited time and memory."""
