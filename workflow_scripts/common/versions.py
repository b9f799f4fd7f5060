"""Versions of what the numbers mean; they stand in the keys of the store.

Raise one by hand when a change of the code changes numbers that were right by the old meaning or wrong
by it: every key that holds it changes, and with it everything downstream is made again. Leave it when
the numbers stay the same (a rewrite, a faster path). `tests/unit/test_versions.py` notices changed
sources and asks for the decision.
"""

PROBES_VERSION = 2
"""How needles and haystacks become token ids."""

LENS_VERSION = 1
"""How a tuned lens is trained."""

CAPTURE_VERSION = 3
"""What a shard holds and how it is computed."""

CALIBRATION_VERSION = 1
"""How the calibration means are taken."""

PATCHING_VERSION = 2
"""How prompts are corrupted and heads patched."""

ABLATION_VERSION = 2
"""How heads are ablated, answers generated and measured."""
