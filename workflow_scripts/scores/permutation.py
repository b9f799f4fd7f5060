"""Permutation filter of the contrastive detectors: do answer steps differ by more than chance?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.scores.detectors import contrastive_rows, label_difference
from workflow_scripts.scores.pooling import Floats
from workflow_scripts.scores.reductions import Rows, groups_of

SIGNIFICANCE = 0.05


class PermutationFilter:
    """Test of the mean over probes of (answer steps' mean - other steps' mean), a test a head.

    Under the null hypothesis a probe's steps are exchangeable: the labels answer / other are
    shuffled within each probe, keeping how many there are of each. The differences are not clamped,
    and a probe whose steps are all answer steps adds the same to the observed value and to every
    shuffle.

    Parameters
    ----------
    share
        The detector's A per row.
    permutations
        Number of shuffles.
    seed
        Of the shuffles.
    """

    def __init__(self, share: Callable[[Rows], Floats], permutations: int, seed: int) -> None:
        self._share, self._permutations = share, permutations
        self._random = np.random.default_rng(seed)
        self._observed: Floats | float = 0.0
        self._null: Floats | float = 0.0

    def add(self, rows: Rows) -> None:
        """Take in the rows of a shard."""
        probe, shares, is_answer = contrastive_rows(rows, self._share)
        for group in groups_of(probe):
            labels = is_answer[group]
            self._observed += label_difference(shares[group], labels)
            self._null += np.tensordot(self._contrasts(labels), shares[group], axes=1)

    def _contrasts(self, labels: NDArray[np.bool_]) -> Floats:
        """Return the weights that shuffled labels give the steps, (permutations, steps)."""
        table = np.tile(labels, (self._permutations, 1))
        shuffled = self._random.permuted(table, axis=1)
        others = max(1, (~labels).sum())
        weights: Floats = shuffled / labels.sum() - ~shuffled / others
        return weights

    def p_values(self) -> Floats:
        """Return (1 + shuffles that give as much) / (1 + shuffles) per head, (layer, head)."""
        slack = 1e-12  # equal up to the order of summation
        as_large = (np.asarray(self._null) >= np.asarray(self._observed) - slack).sum(0)
        p: Floats = (1 + as_large) / (1 + self._permutations)
        return p
