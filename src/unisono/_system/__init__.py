"""Services of the operating system for several parts: files that are replaced atomically, signals."""
