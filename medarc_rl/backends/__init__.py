"""Back-ends that submit a job to a cluster."""
