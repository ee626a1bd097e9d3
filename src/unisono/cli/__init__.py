"""The command `unisono`: launch a cluster on this machine, and see whether all is well."""
