"""A worker's side: pull, run a program, push."""
