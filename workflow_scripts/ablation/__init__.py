"""Heads are ablated and the answers measured."""
