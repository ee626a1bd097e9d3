"""Each optional feature can be taken away: what remains trains, and using the feature is a clear error."""
