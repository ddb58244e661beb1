"""How the constants in `codebooks.py` were made; ``python -m mlx_lm_tiered.turboquant.derive`` prints them.

Code books: Lloyd's and Max's conditions for N(0, 1), that every boundary is the middle
of its centroids and every centroid the mean of its cell, solved by Newton's method,
whose Jacobian has three diagonals. Signs: mlx's own random bits under key 42, which the
reference format draws at run time; written down, they do not depend on mlx's generator.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from .codebooks import HEAD_DIMS, VALUE_BITS

SEED = 42
# Enough that Newton's method begins near its end.
LLOYD_STEPS = 300


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _mass_above(x: np.ndarray) -> np.ndarray:
    """P(X > x), without cancellation in the tail."""
    return np.array([math.erfc(value / math.sqrt(2)) / 2 for value in x])


def code_book(bits: int) -> np.ndarray:
    """The 2^(bits - 1) positive centroids, rising; the others are their negatives. Raises ArithmeticError if Newton's method does not arrive."""
    half = 1 << (bits - 1)
    # Where many cells are small, centroids lie as the density's cube root does: that of N(0, 3).
    spread = NormalDist(0, math.sqrt(3))
    centroids = np.array([spread.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)])
    for _ in range(LLOYD_STEPS):
        mass, moment = _cells(centroids)
        centroids = moment / mass
    for _ in range(50):
        residual, jacobian = _conditions(centroids)
        step = np.linalg.solve(jacobian, residual)
        centroids = centroids - step
        if np.abs(step).max() < 1e-10:
            return centroids
    raise ArithmeticError(f"no code book of {bits} bits was found")


def _cells(centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mass and the first moment of each cell."""
    edges = np.concatenate([[0.0], (centroids[1:] + centroids[:-1]) / 2])
    density, above = _density(edges), _mass_above(edges)
    return above - np.append(above[1:], 0), density - np.append(density[1:], 0)


def _conditions(centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centroid times mass minus first moment of each cell, and its derivatives by the centroids."""
    edges = np.concatenate([[0.0], (centroids[1:] + centroids[:-1]) / 2])
    density = _density(edges)
    mass, moment = _cells(centroids)
    residual = centroids * mass - moment
    jacobian = np.diag(mass)
    for i in range(len(centroids)):
        # By its lower edge, and by its upper one, each of which moves half as far as either centroid beside it.
        for edge, sign in ((i, -1), (i + 1, 1)):
            if 0 < edge < len(centroids):
                by_edge = sign * density[edge] * (centroids[i] - edges[edge]) / 2
                jacobian[i, edge - 1] += by_edge
                jacobian[i, edge] += by_edge
    return residual, jacobian


def distortion(centroids: np.ndarray) -> float:
    """The mean squared error of N(0, 1) under these positive centroids and their negatives."""
    _, moment = _cells(centroids)
    # E[x^2] = 1; a centroid is the mean of its cell.
    return 1 - 2 * float((centroids * moment).sum())


def sign_bits(dim: int) -> int:
    """Bit i is 1 where the sign of dimension i is plus."""
    import mlx.core as mx

    drawn: list[int] = mx.random.randint(0, 2, (dim,), key=mx.random.key(SEED)).tolist()  # type: ignore[assignment]
    return sum(bit << place for place, bit in enumerate(drawn))


def main() -> None:
    for bits in VALUE_BITS:
        print(f"{bits}: ({', '.join(f'{float(np.float32(c)):.9g}' for c in code_book(bits))}),")
    for dim in HEAD_DIMS:
        print(f"{dim}: 0x{sign_bits(dim):0{dim // 4}x},")


if __name__ == "__main__":
    main()
