"""Replicas that train by themselves for some steps, and then average."""
