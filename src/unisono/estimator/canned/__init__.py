"""Canned estimators: linear models, networks and both together, on feature columns, with heads."""
