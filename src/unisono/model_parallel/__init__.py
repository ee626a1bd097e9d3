"""Replicas of several devices, over which a model's weights and activations lie in parts."""
