"""What a run will cost, from its config alone."""
