"""What a launch shows on a terminal."""
