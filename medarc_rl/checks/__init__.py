"""Checks before a batch job is submitted: of the cluster, the file system, the hub and the job's software."""
