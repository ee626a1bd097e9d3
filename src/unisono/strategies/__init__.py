"""The strategies: where variables live, which devices compute."""
