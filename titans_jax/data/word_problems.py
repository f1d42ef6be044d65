"""Word problems of groups: the running product of a sequence of elements, the standard test of tracking a state.

    tokens    (1 2) (2 3) (1 2) ...        elements of a group, drawn uniformly
    targets   (1 2) (1 3 2) (1 3) ...      the product of all elements so far

The generator of Merrill et al. (arXiv 2404.08819) and of DeltaProduct (arXiv 2502.10297). `group` knows Z_n, S_n, A_n
and direct products of them: "Z2" is parity, "S3", "A5" and "S5" are the usual non-abelian ones, "A4_x_Z5" is solvable.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from titans_jax.data.errors import DataError

LARGEST_ORDER = 1024
"""The most elements of a group whose products are tabulated: S6 has fewer, S7 more."""


@dataclass(frozen=True, eq=False)
class Group:
    """A finite group. table: int32 [order, order], the number of the product a b; element 0 is the identity."""

    name: str
    table: np.ndarray

    @property
    def order(self) -> int:
        """How many elements there are."""
        return len(self.table)


@functools.lru_cache(maxsize=8)
def group(name: str) -> Group:
    """The group of a name such as S3, A5, Z60 or A4_x_Z5.

    Raises:
      DataError: no such group, or one of more than `LARGEST_ORDER` elements.
    """
    factors = [re.fullmatch(r"([SAZ])([1-9][0-9]*)", part) for part in name.split("_x_")]
    if not all(factors):
        raise DataError(f"group is {name!r}; use S, A or Z with a number, such as S5, or several joined by _x_")
    if math.prod(_order(kind, int(size)) for kind, size in (factor.groups() for factor in factors)) > LARGEST_ORDER:
        raise DataError(f"group is {name!r}; use one of at most {LARGEST_ORDER:,} elements")
    tables = [_table(factor[1], int(factor[2])) for factor in factors]
    return Group(name, functools.reduce(_direct_product, tables))


def word_problems(
    group: Group, length: int, count: int, seed: int, apart: np.ndarray | None = None, distinct: bool = False
) -> dict[str, np.ndarray]:
    """`count` sequences; the same seed gives the same ones.

    Args:
      apart: sequences to avoid, int32 [n, length].
      distinct: no two of the returned sequences are the same.

    Returns:
      {"tokens", "targets"}, int32 [count, length]: elements, and the product of those up to each position.

    Raises:
      DataError: there are too few such sequences.
    """
    generator = np.random.default_rng(seed)
    elements = generator.integers(group.order, size=(count, length), dtype=np.int32)
    taken = {row.tobytes() for row in apart} if apart is not None else set()
    left = group.order**length - len(taken)
    if left < (count if distinct else 1):
        raise DataError(f"count is {count}; use at most {left}, as many as {group.name} has others of length {length}")
    for row in elements:
        while row.tobytes() in taken:
            row[:] = generator.integers(group.order, size=length, dtype=np.int32)
        if distinct:
            taken.add(row.tobytes())
    products, reached = np.empty_like(elements), np.zeros(count, np.int32)
    for position in range(length):
        reached = group.table[reached, elements[:, position]]
        products[:, position] = reached
    return {"tokens": elements, "targets": products}


def _order(kind: str, size: int) -> int:
    if kind == "Z":
        return size
    return math.factorial(min(size, 20)) // (1 + (kind == "A" and size > 1))


def _table(kind: str, size: int) -> np.ndarray:
    """The number of the product "first a, then b" of the elements numbered a and b, int32 [order, order]."""
    if kind == "Z":
        return (np.arange(size)[:, None] + np.arange(size)).astype(np.int32) % size
    permutations = [one for one in itertools.permutations(range(size)) if kind == "S" or _even(one)]
    number = {one: place for place, one in enumerate(permutations)}
    products = [[number[tuple(b[place] for place in a)] for b in permutations] for a in permutations]
    return np.array(products, np.int32)


def _even(permutation: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def _direct_product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The table of pairs (a, b), numbered a * len(second) + b."""
    pairs = first[:, None, :, None] * len(second) + second[None, :, None, :]
    return pairs.reshape(first.shape[0] * second.shape[0], -1).astype(np.int32)
