"""The gradient of a whole model is the difference of its losses: every block with every deep memory, and blocks of
Mamba without one, in float64.

A model starts as its initialiser makes it, with noise on every parameter, so that none is where a gradient vanishes.
The slope along a random direction of all parameters at once, each by its own size, is compared with central differences
at two steps and with what they extrapolate to. Corners (|x|, Huber's threshold) are left as they are: a random point is
not on one, and steps are small enough not to cross one; the differences at two steps would disagree if they did.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx

from titans_jax.models import LanguageModel
from titans_jax.models.loss import loss_sum

BLOCKS = ("lmm", "mac", "mag", "mal", "retrofit")
PRESETS = ("titans", "moneta", "yaad", "memora", "ttt_linear", "ttt_mlp")
NOISE, STEP, TOLERANCE = 0.1, 1e-5, 1e-6


def build(block, preset):
    """Two heads of 4, chunks of 4, segments of 8: every border falls inside the tokens, and the last chunk is open."""
    memory = {"preset": preset, "max_step_size": 0.3, "gate_rank": 2}
    config = small.config(block, memory=memory, dim=8, head_dim=4, hidden_dim=12, depth=1, num_persistent=1)
    rng = np.random.default_rng(2)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    noise = lambda x: x.astype(jnp.float64) + NOISE * jnp.asarray(rng.normal(size=x.shape))  # noqa: E731
    params = jax.tree.map(noise, params)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)) * jnp.sqrt(jnp.mean(x**2)), params)
    tokens = small.tokens(batch=1, time=small.TIME + 1)
    segment_ids = jnp.zeros((1, small.TIME), jnp.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": segment_ids}
    return graphdef, params, direction, batch


@pytest.mark.slow_but_for(
    "titans-mac", "moneta-lmm", "yaad-mag", "memora-mal", "ttt_linear-retrofit", "ttt_mlp-lmm", "titans-mamba"
)
@pytest.mark.parametrize(
    "preset, block", [*itertools.product(PRESETS, BLOCKS), ("titans", "mamba"), ("titans", "samba")]
)
def test_the_slope_of_the_loss_is_its_difference(preset, block):
    with jax.enable_x64(True):
        graphdef, params, direction, batch = build(block, preset)
        program = jax.jit(jax.value_and_grad(lambda params: loss_sum(graphdef, params, batch)[0]))
        _, gradient = program(params)
        leaves = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        slope = float(sum(jnp.vdot(g, d) for g, d in leaves))

        def difference(step):
            ahead, behind = (
                program(jax.tree.map(lambda x, d: x + sign * step * d, params, direction))[0]  # noqa: B023
                for sign in (1, -1)
            )
            return float(ahead - behind) / (2 * step)

        wide, narrow = difference(STEP), difference(STEP / 2)
        assert narrow == pytest.approx(slope, rel=TOLERANCE)
        assert abs(narrow - wide) <= 10 * TOLERANCE * abs(slope)  # no corner between them
        assert (4 * narrow - wide) / 3 == pytest.approx(slope, rel=TOLERANCE)
