"""Gates of the papers' values, and values outside their range, refused where they are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax.memory import Gates

HALF = jnp.full((3,), 0.5)


def test_from_values():
    """from_values takes alpha, eta, theta and keeps log(1 - alpha), log eta, theta and the mask."""
    forget, momentum, step_size = (np.float32(value) for value in ([0.0, 0.5], [1.0, 0.25], [0.0, 0.1]))
    gates = Gates.from_values(
        forget=jnp.asarray(forget), momentum=jnp.asarray(momentum), step_size=jnp.asarray(step_size)
    )
    np.testing.assert_allclose(gates.log_retention, np.log1p(-forget), rtol=1e-6)
    np.testing.assert_allclose(gates.log_momentum, np.log(momentum), rtol=1e-6)
    np.testing.assert_array_equal(gates.step_size, step_size)
    assert gates.mask is None
    lists = Gates.from_values([0.0, 0.5], [1.0, 0.25], [0.0, 0.1])
    jax.tree.map(np.testing.assert_array_equal, lists, gates)


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("forget", 1.5, "forget has the value 1.5: it must be in [0, 1]."),
        ("forget", -0.1, "forget has the value -0.1: it must be in [0, 1]."),
        ("momentum", 2.0, "momentum has the value 2: it must be in [0, 1]."),
        ("step_size", -1.0, "step_size has the value -1: it must be 0 or more."),
        ("step_size", float("nan"), "step_size has the value nan: it must be 0 or more."),
    ],
)
def test_values_outside_their_range_are_refused(name, value, sentence):
    gates = {"forget": HALF, "momentum": HALF, "step_size": HALF}
    with pytest.raises(ValueError) as error:
        Gates.from_values(**gates | {name: HALF.at[1].set(value)})
    assert str(error.value) == sentence


def test_the_ends_of_the_range_and_traced_values_are_not():
    ends = jnp.array([0.0, 1.0])
    assert Gates.from_values(ends, ends, 10 * ends).log_retention.shape == (2,)
    assert [gate.shape for gate in Gates.from_values(0.0, 0.5, 1.0).scalars()] == [(), (), ()]
    assert jax.jit(Gates.from_values)(HALF, HALF, HALF).step_size.shape == (3,)
