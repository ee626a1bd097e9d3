"""Run clusters of processes: what to start, what a failure means, and what the terminal shows."""
