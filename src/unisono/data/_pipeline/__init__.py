"""The nodes of a `Dataset`: sources, transformations, their state."""
