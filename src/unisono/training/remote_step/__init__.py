"""The chief's side of steps that run on workers and parameter servers."""
