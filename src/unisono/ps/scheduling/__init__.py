"""What the chief of a cluster decides, and sends to its workers."""
