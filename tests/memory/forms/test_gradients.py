"""The outer gradient, second-order terms included, against differences of the oracle's numbers; the forms agree."""

import functools

import jax
import numpy as np
import pytest
import rules
from rules import FORMS, INPUTS, LINEAR, ONLINE, PAIRS, TIME, TITANS, Case

CASES = (
    LINEAR,
    ONLINE,
    Case("mlp", 3, bias="dot_product", algorithm="gradient_descent"),
    TITANS,
    Case("residual_mlp", 4),
    Case("gated_mlp", 3),
)


def inputs_of(case):
    """What a gradient is due for: plain gradient descent has no momentum gate."""
    names = ["weights", *(name for name in INPUTS if case.algorithm == "momentum" or name != "momentum")]
    return names + ["norm_scale"] * (case.architecture == "residual_mlp")


@functools.cache
def problem(case, time=TIME):
    """Two rows; the second ends in padding."""
    rows = rules.random_rows(case, 2, time)
    rows["mask"] = np.ones((2, time), bool)
    rows["mask"][1, time - 2 :] = False
    return rules.random_params(case), rows, rules.random_probe(case, 2, time)


@functools.cache
def gradients(case, form):
    return rules.run(case, form, *problem(case))["gradients"]


def assert_directional(case, params, rows, probe, found, seed=7, tolerance=1e-8):
    """Along a random direction (of the input's own size) of every input of every row, it is the oracle's difference."""
    generator = np.random.default_rng(seed)
    for index in range(len(rows["keys"])):
        inputs, row_probe = rules.row(rows, index), rules.row(probe, index)
        for name in inputs_of(case):
            leaf = params[name] if name in params else inputs[name]
            direction = jax.tree.map(lambda a: generator.normal(size=a.shape) * np.sqrt(np.mean(a**2)), leaf)
            expected = rules.directional(case, params, inputs, row_probe, name, direction)
            got = sum(
                np.sum(a[index] * b)
                for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(direction), strict=True)
            )
            assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), f"gradient of {name}, row {index}"


@pytest.mark.slow_but_for("residual_mlp2-l2-momentum-4-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outer_gradient_is_the_oracles_difference(case, form):
    assert_directional(case, *problem(case), gradients(case, form))


@pytest.mark.slow
@pytest.mark.parametrize("form", ("associative", "chunked"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forms_agree_in_gradient(case, form):
    reference, found = gradients(case, "recurrent"), gradients(case, form)
    for name in inputs_of(case):
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(reference[name]), strict=True)
        for got, wanted in pairs:
            assert np.linalg.norm(got - wanted) <= 1e-10 * np.linalg.norm(wanted), name


@pytest.mark.slow_but_for("residual_mlp2-l2-momentum-4-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_slow_parameter_and_every_token_learns(case, form):
    """The plain row: gradients are finite and, token by token, not zero."""
    found = rules.row(gradients(case, form), 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    for matrix in found["weights"]:
        assert np.all(np.abs(matrix) > 0)
    if "norm_scale" in found:
        assert np.all(np.abs(found["norm_scale"]) > 0)
    for name in INPUTS:
        per_token = np.abs(found[name])
        if name == "momentum":  # the first token has no past surprise to keep
            per_token = per_token[1:] if case.algorithm == "momentum" else np.ones(1)
        assert np.all(per_token > 0), name


@pytest.mark.slow_but_for("residual_mlp2-l2-momentum-4-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padded_tokens_have_no_gradient(case, form):
    """A padded token's key, value and gates reach nothing."""
    found = rules.row(gradients(case, form), 1)
    mask = problem(case)[1]["mask"][1]
    for name in ("keys", "values", "forget", "momentum", "step_size"):
        np.testing.assert_array_equal(found[name][~mask], 0, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case, form", PAIRS, ids=str)
def test_gradient_through_resets(case, form):
    """After a reset the learned start is read again, so its gradient sums over documents."""
    params, rows, probe = problem(case, 12)
    rows = rows | {"resets": np.zeros((2, 12), bool)}
    rows["resets"][0, [0, 8]] = True
    rows["resets"][1, 4] = True
    found = rules.run(case, form, params, rows, probe)["gradients"]
    assert_directional(case, params, rows, probe, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", [ONLINE, TITANS], ids=str)
def test_gradient_of_many_chunks(case):
    """Chunk groups are recomputed in the backward pass: long rows give the gradient of the token recurrence.

    Steps are small: otherwise 150 tokens behind a layer norm amplify rounding by many orders of magnitude.
    """
    params, rows, probe = problem(case, 150)
    rows = rows | {"step_size": 0.03 * rows["step_size"]}
    found = {form: rules.run(case, form, params, rows, probe)["gradients"] for form in ("recurrent", "chunked")}
    for name in inputs_of(case):
        for got, wanted in zip(*(jax.tree.leaves(found[form][name]) for form in ("chunked", "recurrent")), strict=True):
            assert np.linalg.norm(got - wanted) <= 1e-9 * np.linalg.norm(wanted), name


@pytest.mark.slow
def test_gradient_in_float32():
    """Single precision, compiled as users run it, gives the same gradient nearly to the relative error of the reads."""
    found = rules.run(TITANS, "chunked", *problem(TITANS), dtype=np.float32)["gradients"]
    for name in inputs_of(TITANS):
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(gradients(TITANS, "chunked")[name]), strict=True)
        for got, wanted in pairs:
            assert np.linalg.norm(got - wanted) <= 2e-5 * np.linalg.norm(wanted), name
