"""`titans bench schedule`: one small kernel compiled for a TPU that is not there."""

import csv
import dataclasses
import importlib.util

import jax
import pytest

from titans_jax import cli, memory
from titans_jax.bench import schedule
from titans_jax.config import MemoryConfig, memory_rule
from titans_jax.tpu.hlo import Program
from titans_jax.tpu.schedules import pallas_kernels
from titans_jax.tpu.topology import describe, find_topology

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)


@pytest.mark.tpu_compiler
@pytest.mark.slow
@needs_libtpu
def test_the_kernels_compile_for_a_tpu():
    """Forward and gradient; 'no more than the slots there are, and the matrix unit in use' is what a schedule is."""
    row = schedule.measure("v5e:1x1", schedule.Case(64, 16, expansion=2, rows=1, heads=2))
    assert (row.matrices, row.forward_heads, row.backward_heads) == ("64x128, 128x64", 2, 2)
    assert 0 < row.forward < row.both - row.forward
    assert 0 < row.xla_forward < row.xla_both
    for slots in (row.forward_slots, row.backward_slots):
        assert 0 < slots["MXU"] and all(0 <= share <= 1 for share in slots.values())


@pytest.mark.tpu_compiler
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("preset, topology", [("moneta", "v5e:1x1"), ("yaad", "v5p:2x2x1"), ("comba", "v6e:1x1")])
def test_kernels_compile_with_the_gates_of_their_presets(preset, topology):
    case = schedule.Case(64, 16, expansion=2, rows=1, heads=2, preset=preset)
    mesh = jax.sharding.Mesh(describe(find_topology(topology))[:1], ("device",))
    with jax.set_mesh(mesh):
        compiled = jax.jit(schedule.gradient(case, "auto")).lower(*schedule.inputs(case, mesh)).compile()
    kernels = Program(compiled.as_text()).kernels()
    assert sorted(call.name.split(".")[0] for call, _ in kernels) == ["memorize", "memorize_backward"]


@pytest.mark.tpu_compiler
@pytest.mark.slow
@needs_libtpu
def test_the_kernels_of_the_largest_heads_compile(monkeypatch):
    """`lmm_1b` on a v5p, whose 64 MiB do not hold two buffers of a head's matrices, and on a v5e, whose 128 MiB do, but
    not what a backward kernel needs that repeats a chunk."""
    for topology, rows, heads, chunks, documents in (("v5p:2x2x1", 1, 2, 12, True), ("v5e:1x1", 2, 16, 64, False)):
        monkeypatch.setattr(schedule, "CHUNKS", chunks)  # that share a stored state where there is room
        case = schedule.Case(256, 16, expansion=4, rows=rows, heads=heads)
        mesh = jax.sharding.Mesh(describe(find_topology(topology))[:1], ("device",))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        resets = jax.ShapeDtypeStruct((rows, chunks * 16), bool, sharding=place)
        with jax.set_mesh(mesh):
            gradient = jax.jit(schedule.gradient(case, "fused", documents))
            compiled = gradient.lower(*schedule.inputs(case, mesh), *[resets] * documents).compile()
        assert len(Program(compiled.as_text()).kernels()) == 2, topology


@needs_libtpu
def test_the_backward_kernel_takes_one_of_the_largest_heads_where_retention_is_not_linear():
    """In `moneta_1b`, of packed documents, two took 103 of the 102 MiB that a kernel may use on a v5e."""
    case = schedule.Case(256, 16, expansion=4, rows=1, heads=8, preset="moneta")
    mesh = jax.sharding.Mesh(describe(find_topology("v5e:1x1"))[:1], ("device",))
    resets = jax.ShapeDtypeStruct((1, schedule.CHUNKS * 16), bool)
    with jax.set_mesh(mesh):
        traced = jax.jit(schedule.gradient(case, "fused", documents=True)).trace(*schedule.inputs(case, mesh), resets)
    grids = {kernel.signature.name: kernel.grid for kernel in pallas_kernels(traced.jaxpr.jaxpr)}
    assert grids["memorize_backward"][0] == 8


def test_a_table_without_the_form_of_xla_is_saved(tmp_path):
    """XLA takes a quarter of an hour for some memories of which the kernel's schedule is there in a minute."""
    slots = dict.fromkeys(schedule.SLOTS, 0.5)
    row = schedule.Row("comba", False, "v6e:1x1", 64, "64x64", 64, 9.0, 22.0, 3.0, None, None, 8, 8, slots, slots)
    schedule.save([row], tmp_path)
    with open(tmp_path / "schedule.csv") as file:
        (saved,) = csv.DictReader(file)
    assert (saved["forward"], saved["both"], saved["xla_forward"], saved["xla_both"]) == ("9.0", "22.0", "", "")
    assert (tmp_path / "schedule.png").stat().st_size > 1000


def test_schedules_are_of_the_rule_that_models_have():
    case = schedule.Case(64, 16)
    assert schedule.rule_of(case) == memory_rule(MemoryConfig(expansion=4, chunk_size=16))
    letter = schedule.rule_of(dataclasses.replace(case, letter=True))
    assert letter == memory.presets.titans(expansion=4, chunk_size=16)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--topologies v6f:2x2", "there is no topology v6f:2x2"),
        ("--chunk_sizes 32", "chunk_sizes has 32; use any of 16, 64, 256"),
        (
            "--preset lact",
            "preset is 'lact'; use one of retnet, linear_attention, dfw, lightning_attention, gla",
        ),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(arguments, sentence, capsys):
    assert cli.main(["bench", "schedule", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "schedule"]) == 2
    assert "pip install libtpu" in capsys.readouterr().err
