"""What parts of a rule declare, and that a subclass with another formula does not inherit it."""

import dataclasses

import jax.numpy as jnp
import pytest

from titans_jax.memory.rule import algorithms, architectures, biases, presets, retentions


def declared(part, *names):
    return tuple(getattr(part, name) for name in names)


def test_biases_declare_their_slopes():
    found = {name: declared(make(), "affine", "constant_slope") for name, make in biases.BIASES.items()}
    affine = {"l2": (True, 1.0), "dot_product": (True, 0.0)}
    assert found == dict.fromkeys(found, (False, None)) | affine
    assert declared(biases.affine(), "affine", "constant_slope") == (True, None)
    assert [name for name, make in biases.BIASES.items() if make().gate_by_channel] == ["huber"]


def test_linear_is_the_only_linear_architecture():
    assert declared(architectures.linear(), "linear", "normalized") == (True, False)
    assert declared(architectures.residual_mlp(1), "linear", "normalized") == (False, True)


def test_operations_that_not_every_backend_has():
    assert retentions.elastic_net(smooth="arctan").operations == {"arctan"}
    assert retentions.elastic_net().operations == retentions.decay().operations == frozenset()
    assert algorithms.least_squares().operations == {"custom_linear_solve"}
    assert retentions.lagged_kullback_leibler().operations == {"lag_token"}


def test_another_formula_loses_what_the_old_one_could():
    class Doubled(biases.L2):
        def __call__(self, read, value, gate=None):
            return 2 * super().__call__(read, value, gate)

    class Clipped(biases.Huber):
        def __call__(self, read, value, gate=None):
            return super().__call__(jnp.clip(read, -1, 1), value, gate)

    class Shifted(architectures.Linear):
        def read(self, linear, params, x):
            return linear(0, x) + 1

    class Wide(architectures.Linear):
        def shapes(self, head_dim):
            return ((head_dim, head_dim),) * 2

    class Bounded(retentions.Decay):
        def close(self, carried, opened, params):
            return tuple(jnp.clip(w, -1, 1) for w in carried)

    class Scaled(algorithms.GradientDescent):
        def inner_loss(self, *arguments):
            return 2 * super().inner_loss(*arguments)

    class Sums(algorithms.LeastSquares):
        def read(self, architecture, linears, params, x):
            return linears(2)[0](0, x)

    assert declared(Doubled(), "affine", "constant_slope", "takes_gate") == (False, None, False)
    assert declared(Clipped(), "gate_by_channel", "takes_gate") == (False, True)
    assert not Shifted().linear and not Wide().linear
    assert declared(Bounded(), "linear", "one_slope") == (False, False)
    assert declared(Scaled(), "descends") == (False,) and algorithms.gradient_descent().descends
    assert declared(Sums(), "descends", "keeps_statistics", "linear_only") == (False, False, True)


def test_another_name_or_a_further_field_keeps_it():
    @dataclasses.dataclass(frozen=True)
    class Named(biases.L2):
        comment: str = ""

    assert declared(Named(), "affine", "constant_slope") == (True, 1.0)


def test_a_formula_may_declare_anew():
    class Weighted(biases.L2):
        affine = True

        def __call__(self, read, value, gate=None):
            return jnp.sum(0.25 * jnp.square(read) - read * value, axis=-1)

        def slope(self, gate):
            return 0.5

    assert declared(Weighted(), "affine", "constant_slope") == (True, None)


def test_retentions_whose_reads_are_near_enough_by_one_slope():
    found = {name for name, make in retentions.RETENTIONS.items() if make().one_slope}
    near = {"decay", "elastic_net", "ftrl_elastic_net", "norm_power", "lagged_kullback_leibler"}
    assert near <= found
    assert not found & {"kullback_leibler", "f_divergence", "lq", "bregman_logit"}


@pytest.mark.parametrize("preset", ["retnet", "deltanet", "mesa"])
def test_presets_with_a_matrix_memory_are_exact(preset):
    assert presets.PRESETS[preset].make().exact


def test_a_retention_that_is_not_linear_is_not_exact_inside_a_chunk():
    rule = dataclasses.replace(presets.retnet(), chunk_size=4)
    assert rule.exact
    assert not dataclasses.replace(rule, retention=retentions.norm_power()).exact
