"""Attention inside a segment of MAC: both kernels against plain JAX, on four devices, and compiled for TPUs."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_splash

from tests import child
from titans_jax.layers.attention.segment_pallas import fused_segment_attention
from titans_jax.layers.attention.splash import splash_segment_attention
from titans_jax.layers.attention.xla import KeyValues, segment_attention

BATCH = 2
NAMES = ("output", "queries", "h keys", "h values", "x keys", "x values", "P keys", "P values")


KERNELS = {"fused": fused_segment_attention, "splash": splash_segment_attention}


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(form, operands):
    def attention(queries, h_keys, h_values, keys, values, *prefix):
        return form(queries, (KeyValues(h_keys, h_values), KeyValues(keys, values)), KeyValues(*prefix))

    output, backward = jax.vjp(attention, *operands)
    return output, *backward(test_splash.rows(9, *output.shape).astype(output.dtype))


def operands(time, heads, head_dim, num_prefix):
    """As bfloat16 holds them exactly; the prefix weighs as much as a long past, or its part would hide."""
    rows = [test_splash.rows(i, BATCH, time, heads, head_dim) for i in range(5)]
    rows += [1.5 * test_splash.rows(i, BATCH, num_prefix, heads, head_dim) for i in (5, 6)]
    return [x.astype(jnp.bfloat16).astype(jnp.float32) for x in rows]


# fused: blocks of 128 queries, of which 100 and 300 fill the last one only in part; two steps of two heads that share
# their lanes, and heads that fill no lanes. splash: one block of keys, or two, of 640 keys and of 384 queries.
CASES = [
    ("fused", 100, 2, 48, 16),
    ("fused", 300, 4, 64, 3),
    ("fused", 256, 2, 128, 0),
    ("splash", 100, 2, 48, 16),
    ("splash", 128, 2, 48, 0),
    ("splash", 600, 2, 64, 3),
]


@pytest.mark.slow_but_for("*-100-2-48-16-float32-1e-05")
# As for splash (`test_splash`): sums in another order, and the roundings of bfloat16.
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 6e-3)])
@pytest.mark.parametrize("form, time, heads, head_dim, num_prefix", CASES)
def test_equals_plain_attention(form, time, heads, head_dim, num_prefix, dtype, tolerance):
    exact = operands(time, heads, head_dim, num_prefix)
    actual = value_and_gradients(KERNELS[form], [x.astype(dtype) for x in exact])
    for name, a, b in zip(NAMES, actual, value_and_gradients(segment_attention, exact), strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)
        assert error < tolerance, (name, float(error))


def test_a_token_sees_the_prefix_and_both_contexts_up_to_itself():
    """One query, head and row of the batch at a time, in numpy float64."""
    exact = [np.asarray(x, np.float64) for x in operands(13, 2, 4, 3)]
    queries, h_keys, h_values, keys, values, prefix_keys, prefix_values = exact
    expected = np.zeros_like(queries)
    for b, t, h in np.ndindex(queries.shape[:3]):
        seen_keys = [*prefix_keys[b, :, h], *h_keys[b, : t + 1, h], *keys[b, : t + 1, h]]
        seen_values = [*prefix_values[b, :, h], *h_values[b, : t + 1, h], *values[b, : t + 1, h]]
        weights = np.exp([queries[b, t, h] @ key / np.sqrt(4) for key in seen_keys])
        expected[b, t, h] = weights @ seen_values / weights.sum()
    with jax.enable_x64(True):
        queries, *rows, prefix_keys, prefix_values = map(jnp.asarray, exact)
        context, prefix = (KeyValues(*rows[:2]), KeyValues(*rows[2:])), KeyValues(prefix_keys, prefix_values)
        np.testing.assert_allclose(segment_attention(queries, context, prefix), expected, atol=1e-12)


@pytest.mark.parametrize("index", [0, 37])
def test_a_token_by_itself_sees_what_the_segment_shows_it(index):
    """As in streaming, where the place in the segment is known only when it runs, and the context has room for more."""
    queries, *rows, prefix_keys, prefix_values = operands(60, 2, 16, 4)
    context, prefix = (KeyValues(*rows[:2]), KeyValues(*rows[2:])), KeyValues(prefix_keys, prefix_values)
    whole = segment_attention(queries, context, prefix)
    one = jax.jit(segment_attention)(queries[:, index : index + 1], context, prefix, jnp.int32(index))
    np.testing.assert_allclose(one, whole[:, index : index + 1], atol=1e-6)


MESH = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
import test_segment_attention as t
from titans_jax import sharding

exact = t.operands(200, 4, 48, 16)
with sharding.use_mesh(sharding.make_mesh(fsdp=2, tensor=2)):
    actual = t.value_and_gradients(t.fused_segment_attention, exact)
for a, b in zip(actual, t.value_and_gradients(t.segment_attention, exact), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
"""

TPU = """
import json, re
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from titans_jax import sharding
from titans_jax.layers.attention import KeyValues, segment_attention

def loss(queries, keys, values, prefix):
    context, prefix = KeyValues(keys, values), KeyValues(prefix, prefix)
    return jnp.sum(jnp.square(segment_attention(queries, (context, context), prefix).astype(jnp.float32)))

for topology, fsdp, tensor, head_dim, dtype, time in {cases}:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[: fsdp * tensor]
    with sharding.use_mesh(mesh := sharding.make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)):
        place = NamedSharding(mesh, PartitionSpec(sharding.BATCH, None, "tensor"))
        rows, prefix = (jax.ShapeDtypeStruct((2, t, 4, head_dim), dtype, sharding=place) for t in (time, 5))
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(rows, rows, rows, prefix).compile()
    text = compiled.as_text()
    print(json.dumps([sorted(set(re.findall(r"((?:segment_attention|splash_mha)[a-z_]*)[.0-9]* = ", text))),
                      sorted(set(re.findall(r" (all-[a-z]+|reduce-scatter)[(-]", text)))]), flush=True)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_four_devices_equal_plain_attention():
    """Rows over fsdp and heads over tensor."""
    child.run(MESH, os.path.dirname(__file__))


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install jax[tpu]")
def test_compiles_for_tpus_that_are_not_here():
    cases = (
        ("v5e:2x2", 2, 2, 64, "bfloat16", 512),
        ("v5p:2x2x1", 1, 1, 48, "float32", 200),
        ("tpu7x:2x2x1", 1, 1, 256, "bfloat16", 256),
        ("v5p:2x2x1", 1, 1, 64, "bfloat16", 1024),  # the most tokens
        ("v5e:2x2", 1, 1, 64, "bfloat16", 1152),  # more than the kernel takes
        ("v5p:2x2x1", 1, 1, 64, "float32", 1024),
    )
    *fused, longer, wider = test_splash.compile_for_tpu(TPU, *cases)
    assert fused == [[["segment_attention", "segment_attention_backward"], []]] * 4  # no device needs another's rows
    assert (
        longer[0]
        == wider[0]
        == [f"splash_mha_{kernel}" for kernel in ("dkv_no_residuals", "dq_no_residuals", "fwd_residuals")]
    )
