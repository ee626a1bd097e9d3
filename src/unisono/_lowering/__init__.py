"""How JAX's primitives are computed on CPUs where XLA's own code is slow; other platforms are unaffected."""
