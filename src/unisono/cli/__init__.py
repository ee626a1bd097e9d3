"""The command `unisono`: launch a cluster on this machine, and check the installation."""
