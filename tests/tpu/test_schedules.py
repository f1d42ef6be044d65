"""Cycles of Pallas kernels: files and programs written by hand, and kernels that are traced."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from titans_jax.layers.attention.splash import splash_attention
from titans_jax.layers.attention.xla import KeyValues
from titans_jax.tpu import schedules
from titans_jax.tpu.hlo import Program
from titans_jax.tpu.schedules import (
    Kernel,
    Schedule,
    Signature,
    kernel_cycles,
    pallas_kernels,
    read_schedule,
)

LINES = ["== CAPACITY:", "MXU, VALU", "    2     4", "== UTILIZATION:", "0 1", "2 4", "1 3"]


def write(folder, time, instruction, rows=LINES[4:]):
    file = folder / f"{time}-{instruction}-00-final_hlo-static-per-bundle-utilization.txt"
    file.write_text("\n".join([*LINES[:4], *rows]))


def test_the_last_schedule_is_read(tmp_path):
    write(tmp_path, 16, "memorize.1", ["0 0"])
    write(tmp_path, 17, "memorize.1")
    write(tmp_path, 18, "memorize.12", ["0 0"])
    assert read_schedule(tmp_path, "memorize.1", started=17) == Schedule(3, {"MXU": 3 / 6, "VALU": 8 / 12})
    assert read_schedule(tmp_path, "memorize.1", started=18) is None  # of a program before
    assert read_schedule(tmp_path, "memorize.2") is None


def add(rows: int, x):
    """Three nested turns of four in each of the grid's steps, and a loop of five."""

    def kernel(x, y):
        def inner(i, carried):
            return jax.lax.fori_loop(0, 4, lambda j, z: z + 1, carried)

        value = jax.lax.fori_loop(0, 3, inner, x[...])
        y[...] = jax.lax.fori_loop(0, 5, lambda i, z: z * 2, value)

    block = pl.BlockSpec((rows, 128), lambda i: (i, 0))
    grid, out = (x.shape[0] // rows,), jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=out, name="add")(x)


HLO = """HloModule step, is_scheduled=true

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %add.1 = f32[32,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[32,128]{1,0}}
}

%three (c: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(3)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while.1 = (s32[], f32[8]) while(%t), condition=%three, body=%body
  %add.2 = f32[32,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[32,128]{1,0}}
  %add.3 = f32[64,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[64,128]{1,0}}
  %add.4 = f32[16,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[16,128]{1,0}}
}
"""  # noqa: E501 (HLO has long lines)


def test_cycles_are_rows_times_steps_times_turns_times_calls(monkeypatch, tmp_path):
    """Calls of one kernel are told apart by their shapes; of two equal ones the compiler schedules one."""
    monkeypatch.setattr(schedules, "folder", lambda: tmp_path)
    write(tmp_path, 5, "add.1")
    write(tmp_path, 5, "add.3", ["0 0"] * 7)
    shapes = [jax.ShapeDtypeStruct((n, 128), jnp.float32) for n in (32, 64)]
    jaxpr = jax.make_jaxpr(lambda a, b: (add(8, a), jax.jit(functools.partial(add, 8))(b)))(*shapes).jaxpr
    assert [(kernel.grid, kernel.turns) for kernel in pallas_kernels(jaxpr)] == [((4,), 12), ((8,), 12)]
    found = kernel_cycles(Program(HLO), jaxpr, started=4)
    assert (found.calls, found.scheduled) == (6, 5)
    assert found.cycles == {"add": (3 + 1) * 4 * 12 * 3 + 8 * 12 * 7}


@pytest.mark.parametrize("window, steps", [(None, 2 * 3 * (4 * 5 / 2)), (512, 2 * 3 * 4 * 2)])
def test_steps_that_attention_skips(window, steps):
    """Two rows, three heads, four blocks: the causal kernel's own, and those of a window of one block and its own."""
    time = 4 * (1024 if window is None else 512)
    rows, prefix = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, time, 3, 64), (0, 3, 64)))

    def loss(queries, prefix):
        past = KeyValues(queries, queries)
        return splash_attention(queries, past, KeyValues(prefix, prefix), window).astype(jnp.float32).sum()

    kernels = {k.signature.name: k for k in pallas_kernels(jax.make_jaxpr(jax.grad(loss))(rows, prefix).jaxpr)}
    assert len(kernels) == 3
    assert [kernel.steps for kernel in kernels.values()] == [steps] * 3


def test_any_other_kernel_takes_every_step():
    assert Kernel(Signature("memorize", ()), (3, 4, 4), 1).steps == 48


def test_what_the_user_told_libtpu_stays(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_something=1")
    schedules.ask_for_schedules()
    asked = os.environ["LIBTPU_INIT_ARGS"]
    assert asked.startswith("--xla_something=1 --xla_jf_dump_to=")
    schedules.ask_for_schedules()
    assert os.environ["LIBTPU_INIT_ARGS"] == asked
