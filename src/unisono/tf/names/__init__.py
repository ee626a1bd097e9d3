"""The table of names below `tf`, by area: data that `unisono.tf`, the page on migrating and `migrate` read."""
