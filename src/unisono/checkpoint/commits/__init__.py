"""Commits: directories that are complete or do not exist, on file systems and in object stores."""
