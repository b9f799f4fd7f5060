"""Handing results to others: checks of a store, packs, and archives of shards on web servers."""
