"""How a model becomes files, and files a model."""
