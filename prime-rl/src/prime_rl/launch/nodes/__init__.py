"""Runs the processes of one launch on several nodes: an agent on each, and a host that talks to all of them."""
