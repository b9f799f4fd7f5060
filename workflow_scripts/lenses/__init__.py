"""Tuned lenses: read from a file or the hub, or trained for a model."""
