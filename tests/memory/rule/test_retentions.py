"""Retention gates: each is its published rule in every form, solves the problem it was derived from, and says no."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import miras_inputs
import miras_oracle as oracle
import numpy as np
import pytest
from jax.test_util import check_grads
from miras_inputs import HEAD_DIM, TIME, error, random_params, run

from titans_jax import memory
from titans_jax.memory import retentions

TOLERANCE = 1e-10
THRESHOLD = 0.02


def softplus(x):
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


@dataclasses.dataclass(frozen=True)
class Gate:
    """A retention, its oracle carry, and its published token rule on the weights, of (retention, step_size)."""

    retention: retentions.Retention
    carry: oracle.Carry
    rule: object = None
    forgets: bool = True

    @property
    def memory_rule(self):
        """Positive weights behind a norm, others in M(x) = x W."""
        residual = memory.architectures.residual_mlp(depth=1)
        architecture = residual if self.retention.positive else memory.architectures.linear()
        descent = memory.algorithms.gradient_descent()
        return memory.MemoryRule(architecture, memory.biases.l2(), self.retention, descent, 1)


EXP = retentions.f_divergence(jnp.exp)
SOFTPLUS = retentions.f_divergence(jax.nn.softplus)
GATES = {
    "elastic_net": Gate(
        retentions.elastic_net(THRESHOLD),
        oracle.elastic_net(THRESHOLD),
        lambda a, theta: oracle.elastic_net_rule(a, theta, THRESHOLD),
    ),
    "ftrl_elastic_net": Gate(retentions.ftrl_elastic_net(THRESHOLD), oracle.ftrl_elastic_net(THRESHOLD)),
    "norm_power": Gate(retentions.norm_power(1.5), oracle.norm_power(1.5)),
    "lq": Gate(retentions.lq(1.5), oracle.lq(1.5)),
    "f_divergence-exp": Gate(
        EXP, oracle.f_divergence(np.exp), lambda a, theta: oracle.f_divergence_rule(theta, np.exp), forgets=False
    ),
    "f_divergence-softplus": Gate(
        SOFTPLUS,
        oracle.f_divergence(softplus),
        lambda a, theta: oracle.f_divergence_rule(theta, softplus),
        forgets=False,
    ),
    "bregman_logit": Gate(
        retentions.bregman_logit(),
        oracle.bregman_logit(),
        lambda a, theta: oracle.bregman_logit_rule(theta),
        forgets=False,
    ),
}
each_gate = pytest.mark.parametrize("name", GATES)


def problem(gate, forgets):
    generator = np.random.default_rng(6)
    inputs = miras_inputs.draw_deep(generator, TIME, 1, 0.3)
    if not forgets:
        inputs["retention"] = np.ones((TIME, 1))
    return random_params(gate.memory_rule), inputs


def expect(gate, params, inputs, chunk_size):
    return oracle.descend(
        *(inputs[name] for name in ("queries", "keys", "values")),
        params["weights"],
        params.get("norm_scale"),
        lambda r, t: r,
        chunk_size=chunk_size,
        carries=[gate.carry],
        **miras_inputs.gates(inputs),
    )


@pytest.mark.slow_but_for("elastic_net")
@each_gate
def test_the_gate_alone_token_by_token(name):
    """chunk_size 1: the rule of Miras on the weights themselves where one is printed, on what is carried elsewhere."""
    gate = GATES[name]
    params, inputs = problem(gate, gate.forgets)
    reads, _ = run(gate.memory_rule, "recurrent", params, inputs)
    assert error(reads, expect(gate, params, inputs, 1)) <= TOLERANCE
    if gate.rule is not None:
        tokens = (inputs[key] for key in ("queries", "keys", "values"))
        weights = [gate.carry.weights(params["weights"][0])]
        step = gate.rule(inputs["retention"][:, 0], inputs["step_size"][:, 0])
        published = oracle.token_rule(*tokens, weights, params.get("norm_scale"), step)
        assert error(reads, published) <= TOLERANCE


@pytest.mark.slow_but_for("lq-chunked", "f_divergence-exp-chunked")
@pytest.mark.parametrize("form", ["associative", "chunked"])
@each_gate
def test_the_gate_in_chunks(name, form):
    """Chunks of four: every token's own weights, or along one slope and closed at the last token; forgetting
    included."""
    gate = GATES[name]
    params, inputs = problem(gate, True)
    rule = dataclasses.replace(gate.memory_rule, chunk_size=4)
    expected = expect(gate, params, inputs, 4)
    assert error(run(rule, form, params, inputs)[0], expected) <= TOLERANCE
    assert error(expect(gate, params, inputs, 1), expected) > 1e-4


# The problems behind the rules: W minimises <step, W> + what retains it. `carried` is A_{t-1}, `u` the gradient.


def drawn(shape=(7, 5), seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@functools.cache
def closed_by(retention):
    return jax.jit(lambda carried, opened, params: retention.close((carried,), (opened,), params)[0])


def weights_after(retention, carried, opened, params=None):
    """What is read after a chunk of one token that carried `opened` to `carried`."""
    params = params or {}
    with jax.enable_x64(True):
        closed = closed_by(retention)(jnp.asarray(carried), jnp.asarray(opened), jax.tree.map(jnp.asarray, params))
        return np.asarray(retention.weights((closed,), jax.tree.map(jnp.asarray, params))[0])


def assert_subgradient(smooth, weights, scale):
    """0 is in smooth + scale * d||W||_1."""
    active = weights != 0
    assert 0.1 < np.mean(active) < 0.9
    np.testing.assert_allclose(smooth[active], -scale * np.sign(weights[active]), atol=1e-12)
    assert np.all(np.abs(smooth[~active]) <= scale * (1 + 1e-12))


def test_elastic_net_solves_its_problem():
    """<u, W> + ||W - W'||^2 / (2 eta) + ||W||^2 / (2 beta) + ||W||_1 / alpha, with the constants of eq 22."""
    eta, alpha, beta = 0.5, 0.8, 2.0
    retain = beta / (beta + eta)
    before, u = drawn(), drawn(seed=1)
    retention = retentions.elastic_net(eta * beta / (alpha * (eta + beta)))
    weights = weights_after(retention, retain * before - eta * retain * u, before)
    assert_subgradient(u + (weights - before) / eta + weights / beta, weights, 1 / alpha)


def test_ftrl_elastic_net_solves_its_problem():
    """<U, W> + ||W||^2 / (2 eta) + ||W||_1 / alpha, U the sum of all gradients."""
    eta, alpha = 0.5, 0.8
    total = 2 * drawn()
    weights = weights_after(retentions.ftrl_elastic_net(eta / alpha), -eta * total, np.zeros_like(total))
    assert_subgradient(total + weights / eta, weights, 1 / alpha)


@pytest.mark.parametrize("q", [1.2, 1.5, 2.0])
def test_lq_is_the_mirror_map(q):
    """A = d/dW ||W||_q^2 / (2 (q-1)), so W minimises -<A, W> plus it; W is A at q = 2, and scales with A."""
    carried = drawn()
    weights = weights_after(retentions.lq(q), carried, carried)
    norm = np.sum(np.abs(weights) ** q) ** (1 / q)
    gradient = np.sign(weights) * np.abs(weights) ** (q - 1) * norm ** (2 - q) / (q - 1)
    # The norm of A has 1e-6 added.
    np.testing.assert_allclose(gradient, carried, rtol=1e-5)
    np.testing.assert_allclose(weights_after(retentions.lq(q), 3 * carried, carried), 3 * weights, rtol=1e-5)
    if q == 2:
        np.testing.assert_allclose(weights, carried, rtol=1e-12)


def test_kullback_leibler_solves_its_problem():
    """<u, W> + KL(W, W') / eta + sum W log W / alpha on the simplex: its gradient is one number a column (eq 21)."""
    eta, alpha, size = 0.5, 0.8, 1.7
    before, u = size * oracle.softmax(drawn()), drawn(seed=1)
    forget, step = (1 / alpha) / (1 / alpha + 1 / eta), 1 / (1 / alpha + 1 / eta)
    logits = (1 - forget) * np.log(before) - step * u
    params = {"simplex_size": np.array([size])}
    weights = weights_after(retentions.kullback_leibler(), logits, np.log(before), params)
    np.testing.assert_allclose(np.sum(weights, axis=0), size, rtol=1e-14)
    gradient = u + np.log(weights / before) / eta + np.log(weights) / alpha
    np.testing.assert_allclose(gradient, np.broadcast_to(gradient[:1], gradient.shape), rtol=1e-12)


def squared_softplus(x):
    return jax.nn.softplus(x) ** 2


def bounded(x):
    return 1 + jnp.tanh(x)


def steep(x):
    return jnp.exp(x + x**3)


# Divergences by name, each with the derivative of its f.
NAMED = {
    "chi_squared": (retentions.chi_squared(), lambda t: t - 1),
    "jensen_shannon": (retentions.jensen_shannon(), lambda t: np.log(2 * t / (1 + t))),
    "alpha_0": (retentions.alpha_divergence(0.0), lambda t: 1 - 1 / t),
    "alpha_half": (retentions.alpha_divergence(), lambda t: 2 - 2 / np.sqrt(t)),
    "alpha_1": (retentions.alpha_divergence(1.0), np.log),
    "alpha_3/2": (retentions.alpha_divergence(1.5), lambda t: 2 * (np.sqrt(t) - 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "g", [jnp.exp, jax.nn.softplus, squared_softplus, bounded, steep, *(gate.g for gate, _ in NAMED.values())]
)
@pytest.mark.parametrize("size", [0.01, 1.0, 20.0])
def test_f_divergence_keeps_every_sum(g, size):
    """Whatever increasing g and however large the step, columns keep their sums and no weight is negative."""
    opened = oracle.softmax(drawn()) * np.linspace(0.5, 3.0, 5)
    weights = weights_after(retentions.f_divergence(g), opened + size * drawn(seed=1), opened)
    np.testing.assert_allclose(np.sum(weights, axis=0), np.sum(opened, axis=0), rtol=1e-10)
    assert np.all(weights >= 0) and np.isfinite(weights).all()
    unmoved = weights_after(retentions.f_divergence(g), opened, opened)
    np.testing.assert_allclose(unmoved, opened, rtol=1e-12)


@pytest.mark.parametrize(
    "g, inverse",
    [(jnp.exp, np.log), (jax.nn.softplus, lambda y: np.log(np.expm1(y))), *((g.g, f) for g, f in NAMED.values())],
    ids=["exp", "softplus", *NAMED],
)
def test_f_divergence_solves_its_problem(g, inverse):
    """eta u + f'(W / W') is one number a column, f' the inverse of g (eq 18), and above it where no weight is
    left; with exp it is KL."""
    before, u, eta = oracle.softmax(drawn()), drawn(seed=1), 0.5
    weights = weights_after(retentions.f_divergence(g), before - eta * u, before)
    gradient = eta * u + inverse(weights / before)
    kept = weights > 0
    level = np.broadcast_to(np.max(np.where(kept, gradient, -np.inf), axis=0), gradient.shape)
    np.testing.assert_allclose(gradient[kept], level[kept], rtol=1e-9, atol=1e-10)
    assert np.all(gradient[~kept] >= level[~kept])  # only where f' is finite at 0
    if g is jnp.exp:
        np.testing.assert_allclose(weights, oracle.softmax(np.log(before) - eta * u), rtol=1e-10)


def test_bregman_logit_solves_its_problem():
    """F'(W) = F'(W') - eta u with F' the logit; entries stay inside (0, 1)."""
    before, u, eta = oracle.sigmoid(drawn()), drawn(seed=1), 0.5
    logits = np.log(before / (1 - before))
    weights = weights_after(retentions.bregman_logit(), logits - eta * u, logits)
    np.testing.assert_allclose(np.log(weights / (1 - weights)), logits - eta * u, rtol=1e-11)
    assert np.all((weights > 0) & (weights < 1))


# What is known of the maps.


@pytest.mark.parametrize("q", [1.5, 2.0, 4.0])
def test_norm_power_starts_where_it_is_told_and_has_degree_3_minus_q(q):
    """||W||_q = ||A||_q^(3-q); with q = 4, W grows as A shrinks; a matrix of zeros stays finite."""
    retention, start = retentions.norm_power(q), drawn()
    with jax.enable_x64(True):
        carried = np.asarray(retention.start(jnp.asarray(start)))
        gradient = jax.grad(lambda a: jnp.sum(retention.weights((a,), {})[0]))(jnp.zeros((3, 3)))
    # The norm of A has 1e-6 added.
    np.testing.assert_allclose(weights_after(retention, carried, carried), start, rtol=2e-5)
    weights = weights_after(retention, carried, carried)
    np.testing.assert_allclose(oracle.q_norm(weights, q), oracle.q_norm(carried, q) ** (3 - q), rtol=2e-5)
    assert np.isfinite(gradient).all() and not weights_after(retention, np.zeros((3, 3)), np.zeros((3, 3))).any()


def test_norm_power_of_3_starts_in_the_direction_it_is_told():
    """Its norm is 1 whatever is carried, and a step moves it as any other."""
    retention, start = retentions.norm_power(3), drawn()
    weights = weights_after(retention, np.asarray(retention.start(jnp.asarray(start))), start)
    np.testing.assert_allclose(weights, start / oracle.q_norm(start, 3), rtol=2e-5)
    np.testing.assert_allclose(oracle.q_norm(weights_after(retention, start + 0.1, start), 3), 1, rtol=2e-5)


def test_lq_starts_where_it_is_told():
    with jax.enable_x64(True):
        carried = np.asarray(retentions.lq(1.5).start(jnp.asarray(drawn())))
    np.testing.assert_allclose(weights_after(retentions.lq(1.5), carried, carried), drawn(), rtol=1e-5)


@pytest.mark.parametrize("name, kept", [("exact", 1.0), ("arctan", 2 / np.pi), ("tanh", 1.0)])
def test_smooth_thresholds(name, kept):
    """They are odd, 0 at 0, and take `kept` of the threshold from large entries (memory/README.md, Retention gates that
    are not linear)."""
    z = np.array([[-1e3, -0.1, 0.0, 0.1, 1e3]])
    shrunk = weights_after(retentions.ftrl_elastic_net(0.5, name), z, z)
    np.testing.assert_allclose(shrunk, -shrunk[:, ::-1], atol=1e-15)
    np.testing.assert_allclose(z[0, -1] - shrunk[0, -1], 0.5 * kept, rtol=1e-5)
    assert shrunk[0, 2] == 0 and abs(shrunk[0, 3]) < 0.1


@pytest.mark.parametrize("name", ["norm_power", "lq", "f_divergence-exp", "f_divergence-softplus", "bregman_logit"])
def test_the_outer_loop_differentiates_the_map(name):
    """By what is carried and by what the chunk began with, against finite differences."""
    retention = GATES[name].retention
    opened = oracle.softmax(drawn()) if name.startswith("f_") else drawn()

    @jax.jit
    def read(carried, opened):
        return retention.weights(retention.close((carried,), (opened,), {}), {})[0]

    with jax.enable_x64(True):
        arguments = jnp.asarray(opened + 0.3 * drawn(seed=1)), jnp.asarray(opened)
        check_grads(read, arguments, order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_decay_and_sizes():
    """Simplex sizes start at the root of the inputs or where they are told; start weights fit them."""
    shapes = ((6, 12), (12, 6))
    assert retentions.decay().slow(shapes) == {} and retentions.decay().linear
    np.testing.assert_allclose(retentions.kullback_leibler().slow(shapes)["simplex_size"], np.sqrt([6, 12]), rtol=1e-6)
    np.testing.assert_array_equal(retentions.kullback_leibler(2.5).slow(shapes)["simplex_size"], [2.5, 2.5])
    for size, total in ((None, np.sqrt(HEAD_DIM)), (0.7, 0.7)):
        start = retentions.f_divergence(size=size).start(jnp.asarray(drawn((HEAD_DIM, 4)), jnp.float32))
        np.testing.assert_allclose(np.sum(start, axis=0), np.full(4, total), rtol=1e-5)


def rule_with(retention, architecture):
    descent = memory.algorithms.gradient_descent()
    return memory.MemoryRule(architecture, memory.biases.l2(), retention, descent, 4)


@pytest.mark.parametrize("make", [retentions.kullback_leibler, retentions.f_divergence, retentions.bregman_logit])
@pytest.mark.parametrize("architecture", ["linear", "mlp", "gated_mlp"])
def test_positive_weights_are_refused_where_a_memory_needs_negative_ones(make, architecture):
    with pytest.raises(ValueError, match="^retention is ") as refusal:
        rule_with(make(), getattr(memory.architectures, architecture)())
    assert len(str(refusal.value).splitlines()) == 1
    rule_with(make(), memory.architectures.residual_mlp(1))


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: retentions.norm_power(0.5), "q"),
        (lambda: retentions.alpha_divergence(2.5), "alpha"),
        (lambda: retentions.norm_power(float("nan")), "q"),
        (lambda: retentions.lq(1), "q"),
        (lambda: retentions.lq(2.5), "q"),
        (lambda: retentions.kullback_leibler(0), "size"),
        (lambda: retentions.kullback_leibler(-1.0), "size"),
        (lambda: retentions.f_divergence(size=0), "size"),
        (lambda: retentions.elastic_net(0), "threshold"),
        (lambda: retentions.ftrl_elastic_net(-1e-3), "threshold"),
        (lambda: retentions.elastic_net(0.1, "relu"), "smooth"),
    ],
)
def test_bad_choices_are_refused_in_one_sentence(make, field):
    with pytest.raises(ValueError, match=f"^{field} is ") as refusal:
        make()
    assert len(str(refusal.value).splitlines()) == 1


def test_decay_first_is_refused_with_any_retention_but_decay():
    with pytest.raises(ValueError, match="^algorithm is "):
        dataclasses.replace(memory.presets.gated_deltanet(), retention=retentions.elastic_net())


def test_decay_first_is_refused_in_chunks():
    """Its gradient is taken at the memory that the token's own retention leaves, so that a chunk has no one anchor."""
    with pytest.raises(ValueError, match="^chunk_size is 4: the algorithm, GradientDescent.* it must be 1.$"):
        dataclasses.replace(memory.presets.gated_deltanet(), chunk_size=4)
