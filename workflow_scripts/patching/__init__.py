"""Clean head outputs patched into corrupt runs: which heads cause the answer, one by one."""
