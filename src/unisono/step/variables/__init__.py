"""Variables of replicas: `unisono.Variable`, merge rules."""
