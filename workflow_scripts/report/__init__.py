"""Figures and pages of the results; nothing here needs the model."""
