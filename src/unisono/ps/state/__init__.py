"""What a parameter server holds: variables, pushes that change them, and the files that keep both."""
