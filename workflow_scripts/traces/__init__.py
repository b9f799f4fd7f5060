"""Traces of single answers, and how well a trace tells that an answer used its document."""
