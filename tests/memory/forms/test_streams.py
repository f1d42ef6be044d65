"""Streams: what a token may see, splits and resumption, packed documents, padding, and rows that stay apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rules
from rules import FORMS, INPUTS, LINEAR, ONLINE, PAIRS, TIME, TITANS, Case

from titans_jax import memory

pytestmark = pytest.mark.slow

CASES = (LINEAR, ONLINE, TITANS, Case("gated_mlp", 3))
each_form = pytest.mark.parametrize("form", FORMS)
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_pair = pytest.mark.parametrize("case, form", PAIRS, ids=str)


@functools.cache
def problem(case):
    """TIME equal rows, so that row t can change its token t."""
    rows = rules.copies(rules.random_rows(case, 1, TIME), TIME)
    rows["mask"] = np.ones((TIME, TIME), bool)
    return rules.random_params(case), rows


@functools.cache
def plain_answer(case, form):
    return rules.run(case, form, *problem(case))


def changed(rows):
    return {name: leaf.copy() for name, leaf in rows.items()}


@each_form
@each_case
def test_no_token_sees_a_later_one(case, form):
    """Everything of token t changes in row t; reads and surprises before t keep their bits, those from t on change."""
    params, rows = problem(case)
    other, moved = rules.random_rows(case, 1, TIME, seed=9), changed(rows)
    for token in range(TIME):
        for name in INPUTS:
            moved[name][token, token] = other[name][0, token]
    answer, plain = rules.run(case, form, params, moved), plain_answer(case, form)
    for token in range(TIME):
        for name in ("reads", "loss", "cotangent_norm"):
            np.testing.assert_array_equal(answer[name][token, :token], plain[name][token, :token])
        assert np.all(np.any(answer["reads"][token, token:] != plain["reads"][token, token:], axis=-1))


@each_form
@each_case
def test_two_identical_calls_give_identical_bits(case, form):
    jax.tree.map(np.testing.assert_array_equal, rules.run(case, form, *problem(case)), plain_answer(case, form))


@each_form
@each_case
def test_rows_do_not_see_each_other(case, form):
    """Row 0 becomes another sequence and row 1 gets a NaN: every other row keeps its bits, the NaN stays in its row."""
    params, rows = problem(case)
    other, moved = rules.random_rows(case, 1, TIME, seed=9), changed(rows)
    for name in INPUTS:
        moved[name][0] = other[name][0]
    moved["keys"][1, 3] = np.nan
    answer, plain = rules.run(case, form, params, moved), plain_answer(case, form)
    for name in ("reads", "loss", "weights", "momentum", "anchor"):
        for got, wanted in zip(jax.tree.leaves(answer[name]), jax.tree.leaves(plain[name]), strict=True):
            np.testing.assert_array_equal(got[2:], wanted[2:])
            assert np.isfinite(got[0]).all()
    assert np.isnan(answer["reads"][1, 3:]).any(axis=-1).all()


@each_form
@each_case
def test_padding_changes_nothing(case, form):
    """Row t is padded from token t on: whatever the padding holds, the reads and the last state are the oracle's."""
    params, rows = problem(case)
    padded, other = changed(rows), rules.random_rows(case, TIME, TIME, seed=9)
    padded["mask"] = np.tril(padded["mask"], -1)
    for name in INPUTS:
        padded[name] = np.where(padded["mask"][..., None], padded[name], other[name])
    answer = rules.run(case, form, params, padded)
    for token in range(TIME):
        rules.assert_answers(case, rules.row(answer, token), rules.expect(case, params, rules.row(padded, token)))


@each_form
@each_case
def test_padding_inside_a_document(case, form):
    """Token by token a hole is exact; elsewhere, where only a reset may follow padding, it is never silently wrong."""
    params, rows = problem(case)
    holes = changed(rows)
    holes["mask"][:, [1, 4, 5, 10]] = False
    answer = rules.run(case, form, params, holes)
    if form == "recurrent":
        rules.assert_answers(case, rules.row(answer, 2), rules.expect(case, params, rules.row(holes, 2)))
    else:
        assert np.isnan(answer["reads"]).all()


@each_form
def test_a_row_of_padding_leaves_the_start(form):
    params, rows = problem(TITANS)
    answer = rules.run(TITANS, form, params, rows | {"mask": np.zeros((TIME, TIME), bool)})
    for got, wanted in zip(answer["weights"], params["weights"], strict=True):
        np.testing.assert_allclose(got[0], wanted, rtol=1e-14)
    assert not any(leaf.any() for leaf in answer["momentum"])


def states(case, params, rows):
    """The oracle's state after 0, 1, 2, ... tokens of row 0, momentum and anchor included."""
    found = [rules.expect(case, params, {name: rows[name][0, :offset] for name in INPUTS}) for offset in range(TIME)]
    names = ("weights", "momentum", "anchor", "position")
    return [{name: answer[name] for name in names} for answer in found]


def stacked(states):
    return {
        name: tuple(np.stack([state[name][index] for state in states]) for index in range(len(states[0][name])))
        for name in ("weights", "momentum", "anchor")
    } | {"position": np.array([state["position"] for state in states], np.int32)}


@each_pair
def test_resume_at_every_token(case, form):
    """Row s resumes from the state after s tokens, position traced, and reads the next seven as if never split."""
    params, rows = rules.random_params(case), rules.random_rows(case, 1, TIME + 7)
    starts = states(case, params, rows)
    offsets = np.arange(TIME)[:, None] + np.arange(7)
    resumed = {name: rows[name][0][offsets] for name in INPUTS} | {"state": stacked(starts)}
    answer = rules.run(case, form, params, resumed)
    for offset in range(TIME):
        inputs = {name: resumed[name][offset] for name in INPUTS} | {"state": starts[offset]}
        rules.assert_answers(case, rules.row(answer, offset), rules.expect(case, params, inputs))


@each_pair
def test_token_by_token_equals_one_call(case, form):
    """Eleven calls of one token, each from the returned state: every split at once, and what decoding does."""
    params, rows = problem(case)
    plain, state = plain_answer(case, form), stacked(states(case, params, rows)[:1])
    for token in range(TIME):
        one = {name: rows[name][:1, token : token + 1] for name in INPUTS}
        answer = rules.run(case, form, params, one | {"state": state})
        np.testing.assert_allclose(answer["reads"][0, 0], plain["reads"][0, token], rtol=1e-10, atol=1e-12)
        state = {name: answer[name] for name in ("weights", "momentum", "anchor", "position")}
    for name in ("weights", "anchor") + ("momentum",) * (case.algorithm == "momentum"):
        for got, wanted in zip(state[name], plain[name], strict=True):
            np.testing.assert_allclose(got[0], wanted[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "case, form, offset", [(TITANS, "associative", 3), (TITANS, "chunked", 1), (LINEAR, "chunked", 3)], ids=str
)
def test_resume_at_a_static_position(case, form, offset):
    """A Python position is the fast path: the same numbers without tracing it."""
    params, rows = rules.random_params(case), rules.random_rows(case, 1, TIME + 7)
    start = states(case, params, rows)[offset]
    inputs = {name: rows[name][0, offset:] for name in INPUTS}

    @jax.jit
    def answer(params, inputs, start):
        return rules.memorize(case, form, params, inputs | {"state": start | {"position": offset}})

    with jax.enable_x64(True):
        arrays = {name: tuple(start[name]) for name in ("weights", "momentum", "anchor")}
        found = jax.tree.map(np.asarray, answer(*jax.tree.map(jnp.asarray, (params, inputs, arrays))))
    rules.assert_answers(case, found, rules.expect(case, params, inputs | {"state": start}))


def packed(case):
    """Rows of 16 tokens: aligned documents; documents with padded ends; a reset inside a chunk of four; no reset."""
    rows = rules.random_rows(case, 4, 16)
    rows["mask"] = np.ones((4, 16), bool)
    rows["resets"] = np.zeros((4, 16), bool)
    rows["resets"][0, [0, 4, 12]] = True
    rows["resets"][1, [0, 8]] = True
    rows["mask"][1, [6, 7, 13, 14, 15]] = False
    rows["resets"][2, 6] = True
    return rows


@each_pair
def test_packed_documents_equal_separate_documents(case, form):
    params, rows = rules.random_params(case), packed(case)
    answer = rules.run(case, form, params, rows)

    def alone(index, begin, end):
        return rules.expect(case, params, {name: rows[name][index, begin:end] for name in INPUTS})

    for index, begin, end in ((0, 0, 4), (0, 4, 12), (0, 12, 16), (1, 0, 6), (1, 8, 13), (3, 0, 16)):
        got = answer["reads"][index, begin:end]
        np.testing.assert_allclose(got, alone(index, begin, end)["reads"], rtol=1e-9, atol=1e-11)
    for index in (0, 1, 3):
        rules.assert_answers(case, rules.row(answer, index), rules.expect(case, params, rules.row(rows, index)))
    if form == "recurrent" or case.chunk_size == 1:
        rules.assert_answers(case, rules.row(answer, 2), rules.expect(case, params, rules.row(rows, 2)))
    else:  # an unaligned reset is never silently wrong
        assert np.isnan(answer["reads"][2]).all()


@each_pair
def test_resets_go_to_the_given_state_and_follow_the_running_grid(case, form):
    """Row 0 resumes two tokens into a chunk, so its boundary is token 2; row 1 resets off the running grid."""
    params, rows = rules.random_params(case), rules.random_rows(case, 2, 10)
    stream = states(case, params, rules.random_rows(case, 1, TIME, seed=5))
    rows["resets"] = np.zeros((2, 10), bool)
    rows["resets"][0, [2, 6]] = True
    rows["resets"][1, 4] = True
    rows["state"] = stacked([stream[6], stream[6]])
    rows["initial_state"] = stacked([stream[4], stream[8]])
    answer = rules.run(case, form, params, rows)
    expected = [
        rules.expect(case, params, rules.row(rows, index) | {"state": stream[6], "initial_state": stream[initial]})
        for index, initial in ((0, 4), (1, 8))
    ]
    rules.assert_answers(case, rules.row(answer, 0), expected[0])
    if form == "recurrent" or case.chunk_size == 1:
        rules.assert_answers(case, rules.row(answer, 1), expected[1])
    else:
        assert np.isnan(answer["reads"][1]).all()


def test_surprise_is_optional():
    """Asking for it adds a result and changes none."""
    params, rows = rules.random_params(LINEAR), rules.row(rules.random_rows(LINEAR, 1, TIME), 0)

    @jax.jit
    def both(params, rows):
        gates = memory.Gates.from_values(**{name: rows[name] for name in ("forget", "momentum", "step_size")})
        tokens = (rows[name] for name in ("queries", "keys", "values"))
        arguments = (LINEAR.rule, params, memory.init_state(LINEAR.rule, params), *tokens, gates)
        return memory.memorize(*arguments), memory.memorize(*arguments, return_surprise=True)

    (reads, state), (same_reads, same_state, surprise) = both(*jax.tree.map(jnp.float32, (params, rows)))
    jax.tree.map(np.testing.assert_array_equal, (reads, state), (same_reads, same_state))
    assert surprise.loss.shape == surprise.cotangent_norm.shape == (TIME,)
