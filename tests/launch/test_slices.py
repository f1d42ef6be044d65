"""The launcher's table of slices, which needs nothing installed, beside the one that programs are compiled for."""

import common
import pytest

from titans_jax.tpu.topology import find_topology, slice_shapes

COMPILED = [generation for generation in common.GENERATIONS if generation.name != "v4"]  # one program runs two v4 cores


@pytest.mark.parametrize("generation", COMPILED, ids=lambda generation: generation.name)
def test_every_slice_that_is_ordered_has_a_shape_to_compile_for(generation):
    for chips in generation.sizes:
        accelerator = f"{generation.prefix}-{chips * generation.cores_per_chip}"
        if accelerator == "tpu7x-2":  # a single chip is described to the compiler as part of a host's four
            continue
        topology = find_topology(accelerator)
        assert topology.chips == chips == common.parse_type(accelerator).chips
        assert topology.shape in slice_shapes(topology.generation)
