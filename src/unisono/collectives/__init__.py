"""All-reduce and its relatives between devices."""
