"""Where else than on this machine a launch can run: Slurm and others start, restart and end the tasks."""
