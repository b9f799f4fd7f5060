"""Needles and haystacks become token ids with exact needle spans."""
