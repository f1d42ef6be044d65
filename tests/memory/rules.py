"""The rules the memory tests run, random inputs for them, and the two programs (package, oracle) that answer.

Everything goes in and comes out as numpy float64 with a leading row axis; one compiled program per rule, form and shape
serves many rows, because compiling is what these tests cost.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from titans_jax import memory

HEAD_DIM = 8
TIME = 11  # of chunks of four: two and a remainder
ROWS = 11
FORMS = ("recurrent", "associative", "chunked")
INPUTS = ("queries", "keys", "values", "forget", "momentum", "step_size")


@dataclass(frozen=True)
class Case:
    """One rule, in the words of both the package and the oracle."""

    architecture: str
    depth: int = 1
    bias: str = "l2"
    algorithm: str = "momentum"
    chunk_size: int = 4
    expansion: int = 2
    scale_keys: bool = False

    def __str__(self):
        architecture = f"{'scaled-' if self.scale_keys else ''}{self.architecture}"
        return f"{architecture}{self.depth}-{self.bias}-{self.algorithm}-{self.chunk_size}"

    @property
    def rule(self):
        options = {
            "linear": {},
            "mlp": {"depth": self.depth, "expansion": self.expansion},
            "residual_mlp": {"depth": self.depth, "expansion": self.expansion, "scale_keys": self.scale_keys},
            "gated_mlp": {"expansion": self.expansion},
        }[self.architecture]
        return memory.MemoryRule(
            architecture=getattr(memory.architectures, self.architecture)(**options),
            bias=getattr(memory.biases, self.bias)(),
            retention=memory.retentions.decay(),
            algorithm=getattr(memory.algorithms, self.algorithm)(),
            chunk_size=self.chunk_size,
        )

    @property
    def oracle_rule(self):
        architecture = "mlp" if self.architecture == "linear" else self.architecture
        momentum = self.algorithm == "momentum"
        return oracle.Rule(architecture, self.bias, momentum, self.chunk_size, scale_keys=self.scale_keys)

    @property
    def shapes(self):
        """[in, out] of every fast matrix."""
        hidden = self.expansion * HEAD_DIM
        if self.architecture == "gated_mlp":
            return ((HEAD_DIM, hidden), (HEAD_DIM, hidden), (hidden, HEAD_DIM))
        widths = [HEAD_DIM] + [hidden] * (self.depth - 1) + [HEAD_DIM]
        return tuple(zip(widths[:-1], widths[1:], strict=True))


LINEAR = Case("linear")
ONLINE = Case("linear", chunk_size=1)
TITANS = Case("residual_mlp", 2)
EVERY_CASE = (
    LINEAR,
    ONLINE,
    Case("linear", algorithm="gradient_descent"),
    Case("linear", bias="dot_product", algorithm="gradient_descent"),
    Case("mlp", 1),
    Case("mlp", 2, algorithm="gradient_descent"),
    Case("mlp", 3, bias="dot_product"),
    Case("mlp", 4),
    Case("residual_mlp", 1),
    TITANS,
    Case("residual_mlp", 2, scale_keys=True),
    Case("residual_mlp", 3, algorithm="gradient_descent"),
    Case("residual_mlp", 4),
    Case("gated_mlp", 3),
)


# Where few rules are enough: every form of the default memory, and the exact path that `chunked` takes if M is linear.
PAIRS = (*((TITANS, form) for form in FORMS), (LINEAR, "chunked"), (ONLINE, "chunked"))


def random_params(case, seed=0):
    """Slow parameters with fan-in scale; a norm scale away from one, so that it cannot be forgotten."""
    generator = np.random.default_rng(seed)
    params = {"weights": tuple(generator.normal(size=shape) / np.sqrt(shape[0]) for shape in case.shapes)}
    if case.architecture == "residual_mlp":
        params["norm_scale"] = 1 + 0.3 * generator.normal(size=HEAD_DIM)
    return params


def random_rows(case, rows, time, seed=1):
    """Unit keys and queries, and gates away from their ends with one set per matrix: [rows, time, ...].

    Behind a layer norm the steps are smaller: there a step of 0.1 overshoots (memory/README.md, Gates) and the row
    turns chaotic.
    """
    generator = np.random.default_rng(seed)
    queries, keys, values = generator.normal(size=(3, rows, time, HEAD_DIM))
    gates = (rows, time, len(case.shapes))
    return {
        "queries": queries / np.linalg.norm(queries, axis=-1, keepdims=True),
        "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "values": values,
        "forget": generator.uniform(0.02, 0.4, gates),
        "momentum": generator.uniform(0.1, 0.9, gates),
        "step_size": generator.uniform(0.01, 0.1, gates) * (0.3 if case.architecture == "residual_mlp" else 1),
    }


def random_probe(case, rows, time, seed=2):
    """Cotangents that turn reads and the last state into the scalar whose gradients are compared."""
    generator = np.random.default_rng(seed)
    probe = {
        "reads": generator.normal(size=(rows, time, HEAD_DIM)),
        "weights": tuple(generator.normal(size=(rows, *shape)) for shape in case.shapes),
    }
    if case.algorithm == "momentum":
        probe["momentum"] = tuple(generator.normal(size=(rows, *shape)) for shape in case.shapes)
    return probe


def copies(rows, count):
    """The first row `count` times, free to be changed."""
    return jax.tree.map(lambda leaf: np.repeat(leaf[:1], count, axis=0), rows)


def row(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def scalar(probe, answer):
    """sum(probe * answer) over whatever the probe names."""
    return sum(
        jnp.sum(a * b)
        for name in probe
        for a, b in zip(jax.tree.leaves(probe[name]), jax.tree.leaves(answer[name]), strict=True)
    )


def memorize(case, form, params, inputs):
    """One row through the package; `inputs` may also hold mask, resets, state and initial_state (dicts of arrays)."""
    state, initial_state = (
        memory.MemoryState(**inputs[name]) if name in inputs else None for name in ("state", "initial_state")
    )
    gates = memory.Gates.from_values(
        forget=inputs["forget"], momentum=inputs["momentum"], step_size=inputs["step_size"], mask=inputs.get("mask")
    )
    reads, state, surprise = memory.memorize(
        case.rule,
        params,
        memory.init_state(case.rule, params) if state is None else state,
        inputs["queries"],
        inputs["keys"],
        inputs["values"],
        gates,
        form=form,
        resets=inputs.get("resets"),
        initial_state=initial_state,
        return_surprise=True,
    )
    return {
        "reads": reads,
        "weights": state.weights,
        "momentum": state.momentum,
        "anchor": state.anchor,
        "position": state.position,
        "loss": surprise.loss,
        "cotangent_norm": surprise.cotangent_norm,
    }


@functools.cache
def program(case, form, with_gradients, optimized):
    def answer(params, inputs, probe):
        if not with_gradients:
            return memorize(case, form, params, inputs)
        fixed = {name: leaf for name, leaf in inputs.items() if name not in INPUTS}

        def objective(params, inputs):
            answer = memorize(case, form, params, inputs | fixed)
            return scalar(probe, answer), answer

        gradients, answer = jax.grad(objective, argnums=(0, 1), has_aux=True)(
            params, {name: inputs[name] for name in INPUTS}
        )
        return answer | {"gradients": gradients[0] | gradients[1]}

    options = {"xla_backend_optimization_level": 3 if optimized else 0}
    return jax.jit(jax.vmap(answer, in_axes=(None, 0, 0)), compiler_options=options)


def run(case, form, params, rows, probe=None, dtype=np.float64):
    """The package's answer for every row; a probe adds "gradients" of its scalar by params and inputs.

    float64 asks for the formulas and compiles without optimization, twice as fast; float32 runs what users run.
    """

    def cast(leaf):
        return jnp.asarray(leaf, dtype if np.issubdtype(np.asarray(leaf).dtype, np.floating) else None)

    with jax.enable_x64(dtype == np.float64):
        answer = program(case, form, probe is not None, dtype == np.float32)(*jax.tree.map(cast, (params, rows, probe)))
        return jax.tree.map(np.asarray, answer)


def expect(case, params, inputs):
    """The oracle's answer for one row, under the names of `run`."""
    state, initial = (oracle.State(**inputs[name]) if name in inputs else None for name in ("state", "initial_state"))
    reads, state, loss, cotangent_norm = oracle.memorize(
        case.oracle_rule,
        params,
        oracle.start(params) if state is None else state,
        **{name: inputs[name] for name in INPUTS},
        mask=inputs.get("mask"),
        resets=inputs.get("resets"),
        initial=initial,
    )
    return {
        "reads": reads,
        "weights": state.weights,
        "momentum": state.momentum,
        "anchor": state.anchor,
        "position": state.position,
        "loss": loss,
        "cotangent_norm": cotangent_norm,
    }


def directional(case, params, inputs, probe, name, direction, step=5e-5):
    """Fourth-order difference of the oracle's probed scalar along `direction` of one parameter or input."""

    def value(scale):
        def moved(tree):
            if name not in tree:
                return tree
            return tree | {name: jax.tree.map(lambda a, b: a + scale * b, tree[name], direction)}

        answer = expect(case, moved(params), moved(inputs))
        return sum(
            np.sum(np.asarray(a) * np.asarray(b))
            for key in probe
            for a, b in zip(jax.tree.leaves(probe[key]), jax.tree.leaves(answer[key]), strict=True)
        )

    return (8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))) / (12 * step)


def assert_answers(case, answer, expected, tolerance=1e-10):
    """Reads, surprise and state of one row agree; the momentum of plain gradient descent is nobody's business."""
    for name in ("reads", "loss", "cotangent_norm", "weights", "anchor", "momentum"):
        if name == "momentum" and case.algorithm != "momentum":
            continue
        pairs = zip(jax.tree.leaves(answer[name]), jax.tree.leaves(expected[name]), strict=True)
        for index, (got, wanted) in enumerate(pairs):
            error = np.sqrt(np.mean((got - wanted) ** 2)) / max(np.sqrt(np.mean(np.square(wanted))), 1e-3)
            assert error <= tolerance, f"{name}[{index}] of {case}: relative RMS {error:.1e}"
    assert answer["position"] == expected["position"]
