"""What must not depend on the mesh: initial parameters, loss and gradients, with every axis in use, and where the
optimizer's state lies. One process with eight devices for all, because their number is fixed when JAX starts.
"""

import os

import pytest

from tests import child
from titans_jax import sharding

PROGRAM = """
import dataclasses, functools
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compiling is all the time this takes
import jax.numpy as jnp, numpy as np
import titans_jax.models.loss
from titans_jax import sharding
from titans_jax.config import Config, DataConfig, MemoryConfig, MeshConfig, ModelConfig, OptimizerConfig
from titans_jax.models.loss import loss_sum
from titans_jax.training.mesh import mesh_of
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.run import init_model

LMM = ModelConfig(
    pattern=("lmm",), dim=16, depth=2, num_heads=2, head_dim=8, vocab_size=32, hidden_dim=32, num_persistent=0,
    dtype="float32", memory=MemoryConfig(expansion=2, chunk_size=4, depth=1),
)
tokens = np.random.default_rng(0).integers(0, 32, (8, 12)).astype(np.int32)
batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": np.ones_like(tokens)}
optimizer = make_optimizer(OptimizerConfig(), 10)

def start_and_gradients(model, devices, **axes):
    config = Config(model=model, data=DataConfig(batch_size=8), mesh=MeshConfig(**axes))
    with sharding.use_mesh(mesh_of(config, devices)):
        graphdef, params = init_model(model, seed=3)
        for moments in (optimizer.init(params)[1][0].mu, optimizer.init(params)[1][0].nu):
            for moment, param in zip(jax.tree.leaves(moments), jax.tree.leaves(params), strict=True):
                assert moment.sharding == param.sharding, (moment.sharding, param.sharding)
        place = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P(sharding.BATCH))
        gradients = jax.jit(jax.value_and_grad(functools.partial(loss_sum, graphdef), has_aux=True))
        (loss, _), grads = gradients(params, jax.device_put(batch, place))
    return jax.tree.map(np.asarray, (params, loss, grads)), params

def check(actual, expected):
    (params, loss, grads), (expected_params, expected_loss, expected_grads) = actual[0], expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
    jax.tree.map(close, grads, expected_grads)

alone = start_and_gradients(LMM, jax.devices()[:1])
# On several devices in blocks of tokens, of which there are three and each device sums its own rows' gradients.
titans_jax.models.loss.MOST_LOGITS = 5 * LMM.vocab_size
for axes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"slice": 2, "data": 1, "fsdp": 4}):
    spread = start_and_gradients(LMM, jax.devices(), **axes)
    check(spread, alone)
    kernel = spread[1]["cycles"]["blocks"][0]["feed_forward"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 16 // axes["fsdp"], 32 // axes.get("tensor", 1))
    first = spread[1]["cycles"]["blocks"][0]["memory"]["start_weights"][0]  # [layers, heads, rows, columns]
    assert first.addressable_shards[0].data.size == first.size // axes["fsdp"] // axes.get("tensor", 1)

# Names and their policies work alike in attention, which compiles faster.
transformer = dataclasses.replace(LMM, pattern=("attention",))
policies = {remat: dataclasses.replace(transformer, remat=remat) for remat in ("full", "names", "offload")}
runs = {remat: start_and_gradients(model, jax.devices()[:1]) for remat, model in policies.items()}
check(runs["names"], runs["full"])
check(runs["offload"], runs["full"])
"""

STEP = (
    PROGRAM.split("optimizer = make_optimizer")[0]
    + """
import optax
from titans_jax.training.step import make_train_step

titans_jax.models.loss.MOST_LOGITS = 5 * LMM.vocab_size

def stepped(devices, parts, **axes):
    config = Config(model=LMM, data=DataConfig(batch_size=8), mesh=MeshConfig(**axes))
    with sharding.use_mesh(mesh_of(config, devices)):
        graphdef, params = init_model(LMM, seed=3)
        state = {"params": params, "optimizer": optax.sgd(1.0).init(params)}
        place = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P(sharding.BATCH))
        step = make_train_step(graphdef, optax.sgd(1.0), parts, z_loss=1e-2, state=state)
        state, metrics = step(state, jax.device_put(batch, place))
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(state["params"]), strict=True):
            assert after.sharding.is_equivalent_to(before.sharding, after.ndim), (before.sharding, after.sharding)
    return jax.tree.map(np.asarray, (state["params"], metrics))

expected, expected_metrics = stepped(jax.devices()[:1], 1)
for parts, axes in ((2, {"data": 1, "slice": 2, "fsdp": 2, "tensor": 2}), (1, {"data": 4, "fsdp": 2})):
    params, metrics = stepped(jax.devices(), parts, **axes)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, (params, metrics), (expected, expected_metrics))
"""
)


COLLECTIVES = (
    PROGRAM.split("optimizer = make_optimizer")[0]
    + """
from titans_jax.tpu.hlo import Program

batch = {name: np.tile(rows, (1, 3))[:, :32] for name, rows in batch.items()}

def sent(pattern, persistent, segment, chunk_size, preset="titans", **axes):
    "Calls and bytes of collectives by kind and axes; those in a scan count as often as it turns."
    memory = MemoryConfig(preset=preset, depth=1, chunk_size=chunk_size, continuum_chunks=(16,))
    model = dataclasses.replace(
        LMM, pattern=(pattern,), num_persistent=persistent, segment=segment, memory=memory
    )
    with sharding.use_mesh(mesh_of(Config(model=model, data=DataConfig(batch_size=8), mesh=MeshConfig(**axes)))):
        graphdef, params = init_model(model, seed=3)
        place = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P(sharding.BATCH))
        gradients = jax.jit(jax.value_and_grad(functools.partial(loss_sum, graphdef), has_aux=True))
        program = Program(gradients.lower(params, jax.device_put(batch, place)).compile().as_text())
        assert program.unknown_loops() == 0
        return program.collectives(dict(jax.sharding.get_mesh().shape))

once, twice = (sent("lmm", 0, 16, chunk_size, data=2, fsdp=2, tensor=2) for chunk_size in (8, 4))
assert once == twice, (once, twice)
once, twice = (sent("hope", 0, 16, chunk_size, "hope", data=2, fsdp=4) for chunk_size in (8, 4))
assert once == twice, (once, twice)
once, twice = (sent("mac", 2, segment, 4, data=2, fsdp=4) for segment in (16, 8))
assert once == twice, (once, twice)
assert {"all-gather", "all-reduce"} <= {collective.kind for collective in once}
"""
)


@pytest.mark.slow
def test_collectives_run_neither_per_chunk_nor_per_segment():
    """Fast matrices spread over `tensor` stay where they are; a segment's parameters are gathered once for all."""
    child.run(COLLECTIVES)


@pytest.mark.slow
def test_a_step_of_copies_is_that_of_one():
    """Each copy adds up its own microbatches; what is summed over the copies at the end is the whole batch's."""
    child.run(STEP)


@pytest.mark.exhaustive  # tests/models/test_sharded_model.py sees one mesh
@pytest.mark.slow
def test_meshes_and_remat_policies_agree():
    child.run(PROGRAM)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_a_process_that_may_use_one_core_has_one_device():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert sharding.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert sharding.cores() == len(allowed)
