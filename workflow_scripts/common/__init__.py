"""What every stage needs: errors, artifacts with provenance, models, decoding."""
