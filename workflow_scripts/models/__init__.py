"""Models that come as something else than a transformers folder become one."""
