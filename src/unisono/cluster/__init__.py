"""Who is in the cluster, and what each task does."""
