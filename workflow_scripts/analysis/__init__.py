"""Views of the rankings, without the model."""
