"""A small robust fit: seconds as a sum of a few costs, none negative, from few and sometimes disturbed measurements."""

from __future__ import annotations

from itertools import combinations

import numpy as np

_ROUNDS = 12
# What one more cost must better, so that two measurements are not explained by three costs.
_SIMPLER = 1.02
_ENOUGH = 1e-3  # relative differences below this tell nothing


def fit(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Costs (k,) such that `features` (m, k) @ costs is near `seconds` (m,), each above 0 and weighted (m,).

    Near: the weighted sum of relative differences is small, not that of their squares, so
    a minority of outliers (a first compilation, a page fault storm) moves nothing. Every
    subset of the costs is tried by reweighted least squares, those that give a negative
    cost are out, and among the others the best is taken, with a bonus for simplicity and for costs that come first.
    What it is off by in the middle is put right at the end.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    scaled = features / scale
    count = features.shape[1]
    best, best_error = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            costs = np.zeros(count)
            costs[list(chosen)] = _reweighted(scaled[:, chosen], seconds, weights)
            if (costs < 0).any() or not np.isfinite(costs).all():
                continue
            error = float((weights * _apart(scaled @ costs, seconds)).sum() / weights.sum()) + _ENOUGH
            error *= _SIMPLER**size
            if error < 0.99 * best_error:  # else the costs that come first
                best, best_error = costs / scale, error
    return best * _middle(seconds / np.maximum(features @ best, 1e-300), weights) if best_error < np.inf else best


def _middle(values: np.ndarray, weights: np.ndarray) -> float:
    """The weighted median: as much weight lies above as below."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differences as shares of the larger: three times as long and a third count the same."""
    return np.abs(one - other) / np.maximum(np.maximum(one, other), 1e-300)


def _reweighted(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    size, costs = seconds, np.zeros(features.shape[1])
    apart = np.ones_like(seconds)
    for _ in range(_ROUNDS):
        # Least squares, each weighted by 1 / its difference of the round before: a sum of differences.
        root = np.sqrt(weights / np.maximum(apart, 1e-3)) / size
        costs = np.linalg.lstsq(features * root[:, None], seconds * root, rcond=None)[0]
        expected = features @ costs
        apart, size = _apart(expected, seconds), np.maximum(seconds, expected)
    return costs
