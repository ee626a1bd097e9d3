"""Programs that compute with some rows of large tables."""
