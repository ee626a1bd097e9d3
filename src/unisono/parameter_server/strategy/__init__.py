"""`ParameterServerStrategy`, its tasks, and the coordinator."""
