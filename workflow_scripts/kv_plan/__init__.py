"""Which KV groups a compressed cache should keep in full, and whether the answers bear it."""
