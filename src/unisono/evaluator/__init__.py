"""Evaluation beside training: `unisono.SidecarEvaluator`."""
