"""Files of other people are fetched once, checked, and kept in the store."""
