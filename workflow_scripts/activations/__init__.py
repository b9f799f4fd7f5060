"""Forward passes become shards of attention weights and logit contributions."""
