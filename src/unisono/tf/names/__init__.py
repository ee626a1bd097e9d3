"""The table of names below `tf`, by area: `unisono.tf`, the page on migrating and `migrate` read it."""
