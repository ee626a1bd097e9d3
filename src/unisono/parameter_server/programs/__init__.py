"""Programs for workers and servers."""
