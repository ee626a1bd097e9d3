"""A running job, looked at from outside: its files and servers as one record, and what shows it."""
