"""Generations of TPU chips: what jax calls them, what they compute, hold and send, and the largest slices of them."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """A kind of chip. Peak, links and slices are those of cloud.google.com/tpu/docs, one page a generation."""

    name: str
    kind: str
    """jax's device kind."""
    ordered_as: str
    """Accelerator types are this, a dash and a number."""
    counted: int
    """How much one chip adds to the number in an accelerator type."""
    devices: int
    """How many jax devices one chip is; they share it evenly."""
    peak_flops: float
    """bfloat16 operations per second of a chip."""
    products: int
    """Multiply-adds per cycle of all matrix units of a chip. The clock follows from this and the peak. As a check: with
    it, the compiler's cycles for a program that streams memory are 75 to 81 % of each chip's published bandwidth."""
    hbm: float
    """Bytes of a chip's memory that a program may use, a little less than all: from the compiler's error when a program
    does not fit."""
    ici: float
    """Bytes per second that a chip sends to the others of its slice, all its links together."""
    largest: tuple[int, ...]
    """Shape of the largest slice; empty where jax's descriptions of slices do not match the hardware."""

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.peak_flops / (2 * self.products)


GENERATIONS = {
    generation.name: generation
    for generation in (
        # jax describes a v4 chip as two devices, though it runs as one.
        Generation("v4", "TPU v4", "v4", 2, 1, 275e12, 8 * 128**2, 30.75 * GIB, 300e9, ()),
        Generation("v5e", "TPU v5 lite", "v5litepod", 1, 1, 197e12, 4 * 128**2, 15.75 * GIB, 200e9, (16, 16)),
        Generation("v5p", "TPU v5", "v5p", 2, 1, 459e12, 8 * 128**2, 95.74 * GIB, 600e9, (16, 16, 24)),
        Generation("v6e", "TPU v6 lite", "v6e", 1, 1, 918e12, 4 * 256**2, 31.25 * GIB, 400e9, (16, 16)),
        Generation("tpu7x", "TPU7x", "tpu7x", 2, 2, 2307e12, 8 * 256**2, 189.5 * GIB, 600e9, (16, 24, 24)),
    )
}


def peak_flops(kind: str) -> float | None:
    """bfloat16 operations per second of one device of jax's device kind, None where it is not known."""
    found = [generation for generation in GENERATIONS.values() if generation.kind == kind]
    return found[0].peak_flops / found[0].devices if found else None
