"""How arrays travel between devices."""
