"""Meet before JAX starts: who is in the cluster, and whether all run the same program."""
