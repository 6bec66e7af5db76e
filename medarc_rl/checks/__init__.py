"""What a batch job needs that only the cluster, the file system and the hub can tell."""
