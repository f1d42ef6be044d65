"""The same model on eight devices, spread over data, fsdp and tensor axes, gives the numbers of one device.

In a process of its own, because the number of devices is fixed when JAX starts.
"""

import os

import pytest

from tests import child

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from flax import nnx
import small_models as small
from titans_jax import sharding
from titans_jax.models import LanguageModel

config = small.config(*PATTERN, depth=len(PATTERN), dtype="float32", memory={"max_step_size": 0.1})
alone, tokens = small.build(config), small.tokens(batch=4, time=TIME)
value_and_gradient = jax.jit(jax.value_and_grad(lambda model: jnp.mean(jnp.square(model(tokens)))))
expected = value_and_gradient(alone)
with sharding.use_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
    _, abstract = nnx.get_abstract_model(lambda: LanguageModel(config, rngs=nnx.Rngs(0)), jax.sharding.get_mesh())
    shardings = [leaf.sharding for leaf in jax.tree.leaves(abstract)]
    leaves, structure = jax.tree.flatten(alone)
    spread = jax.tree.unflatten(structure, jax.device_put(leaves, shardings))
    actual = value_and_gradient(spread)
kernel = spread.cycles.blocks[0].feed_forward.up.kernel[...]
assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor"), kernel.sharding
for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(a).max()))
"""

HOPE = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from flax import nnx
import small_models as small
from titans_jax import sharding
from titans_jax.models.hope import Hope

config = small.config("hope", depth=1, dtype="float32", memory={"preset": "hope", "continuum_chunks": (4,)})
make = lambda: Hope(config, rngs=nnx.Rngs(0))
alone, x = make(), jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, config.dim)), jnp.float32)
value_and_gradient = jax.jit(jax.value_and_grad(lambda layer, x: jnp.mean(jnp.sin(3 * layer(x)[0]))))
expected = value_and_gradient(alone, x)
with sharding.use_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
    _, abstract = nnx.get_abstract_model(make, jax.sharding.get_mesh())
    leaves, structure = jax.tree.flatten(alone)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(abstract)]
    actual = value_and_gradient(jax.tree.unflatten(structure, jax.device_put(leaves, shardings)), x)
for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(a).max()))
"""


@pytest.mark.parametrize("pattern, time", [(("mac",), 8), (("samba", "window"), 150)])
def test_eight_devices_equal_one(pattern, time):
    """Samba over three chunks of its scan."""
    child.run(f"PATTERN, TIME = {pattern}, {time}{PROGRAM}", os.path.dirname(__file__))


@pytest.mark.exhaustive  # test_eight_devices_equal_one sees other blocks
def test_hope_on_eight_devices_equals_one():
    """Where its rows were not held to their devices, XLA took some of them for one another."""
    child.run(HOPE, os.path.dirname(__file__))
