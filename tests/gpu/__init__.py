"""What needs a GPU to be shown: `make gpu` runs it, and `make gpu-stand-in` on virtual CPU devices."""
