"""The command `unisono`: launch a cluster, serve one, and check the installation."""
