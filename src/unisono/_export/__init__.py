"""The implementation of `unisono.export`: writing models to files and loading them."""
