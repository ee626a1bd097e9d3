"""What the tasks of a `ParameterServerStrategy` do: chief, workers and parameter servers."""
