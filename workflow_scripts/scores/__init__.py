"""Shards become head scores, without the model."""
