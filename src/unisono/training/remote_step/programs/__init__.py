"""Programs for the workers and servers of a parameter-server strategy, made on the chief."""
