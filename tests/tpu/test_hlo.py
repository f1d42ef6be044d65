"""Costs read from HLO text: a program written by hand, whose costs are known."""

import pytest

from titans_jax.tpu.hlo import Program

# Two layers; in each of them three chunks. Devices 0 1 2 3 are fsdp x tensor = 2 x 2.
HLO = """HloModule step, is_scheduled=true

FileNames
1 "/somewhere/titans_jax/memory/engine.py"
2 "/elsewhere/optax/_src/update.py"
3 "/somewhere/titans_jax/training/step.py"

FunctionNames
1 "one"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=2 function_name_id=1 line=1}
3 {file_name_id=3 function_name_id=1 line=1}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=2}

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  %all-gather.1 = f32[8]{0:T(128)} all-gather(%p), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  ROOT %n = f32[8]{0} negate(%all-gather.1), backend_config={"estimated_cycles":"1000"}
}

%all-reduce-scatter.7 (p: f32[8]) -> f32[4] {
  %all-reduce.9 = f32[8]{0} all-reduce(%p), channel_id=5, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %ds = f32[4]{0} dynamic-slice(%all-reduce.9)
}

%chunk (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = f32[8]{0} fusion(%x), calls=%fused, metadata={stack_frame_id=2}, backend_config={"estimated_cycles":"10"}
  %k.1 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %b = f32[8]{0} fusion(%x), calls=%fused, metadata={stack_frame_id=2}, backend_config={"estimated_cycles":"10"}
}

%three (c: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%layer (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %while.1 = (s32[]{:T(128)}, f32[8]{0}) while(%t), condition=%three, body=%chunk
  %r = f32[8]{0} all-reduce(%x), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
}

%two (c: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(2)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while.2 = (s32[]{:T(128)}, f32[8]{0}) while(%t), condition=%two, body=%layer
  %s = f32[4]{0} fusion(%x), calls=%all-reduce-scatter.7, metadata={stack_frame_id=1}, backend_config={"estimated_cycles":"5"}
  %q = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %m = (bf16[8]{0}, bf16[8]{0}, u32[]) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,3},{3,0}}
  %w = f32[8]{0} all-reduce(%x), channel_id=4, replica_groups={}, to_apply=%add
  ROOT %u = f32[8]{0} add(%x), metadata={stack_frame_id=3}, backend_config={"estimated_cycles":"1"}
}
"""  # noqa: E501 (HLO has long lines)


def test_cycles_are_multiplied_by_the_loops_around_them():
    """Those of a fusion are its own, not of what it is made of; a foreign file counts to the one that called it."""
    assert dict(Program(HLO).cycles()) == {"memory/engine": 2 * 3 * (10 + 10), "training/step": 5 + 1}


def test_collectives_by_kind_and_axes():
    """Rings of n devices send (n - 1) / n of what is gathered, twice that of what is summed."""
    found = {(c.kind, c.axes): (c.calls, c.sent) for c in Program(HLO).collectives({"fsdp": 2, "tensor": 2})}
    assert found == {
        ("all-gather", ("fsdp",)): (6, 6 * 32 / 2),  # one, though two fusions hide it
        ("all-reduce", ("tensor",)): (2, 2 * 2 * 32 / 2),
        ("reduce-scatter", ("fsdp",)): (1, 32 / 2),
        ("collective-permute", ("fsdp", "tensor")): (1, 16),
        ("all-reduce", ("fsdp", "tensor")): (1, 2 * 32 * 3 / 4),
    }


def test_kernels_are_counted_apart():
    assert [(call.name, times) for call, times in Program(HLO).kernels()] == [("k.1", 6), ("q", 1)]


def test_what_cannot_be_read_is_told_or_refused():
    assert Program(HLO).unknown_loops() == 0
    assert Program(HLO.replace("constant(3)", "parameter(1)")).unknown_loops() == 1
    with pytest.raises(ValueError, match="a form that is not known"):
        Program(HLO.replace("replica_groups={}", "replica_groups=@list")).collectives({"fsdp": 2, "tensor": 2})


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,1},{2,3}}", ("tensor",)),
        ("[2,2]<=[4]", ("tensor",)),
        ("[2,2]<=[2,2]T(1,0)", ("fsdp",)),
        ("[1,4]<=[4]", ("fsdp", "tensor")),
        ("mesh['a'=2,'b'=1,'c'=2] {'a'}", ("fsdp",)),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ("tensor",)),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", ("tensor",)),
    ],
)
def test_every_way_to_write_groups(groups, axes):
    program = Program(HLO.replace("replica_groups={}", f"replica_groups={groups}"))
    expected = 2 * 32 * (1 / 2 if len(axes) == 1 else 3 / 4)
    sent = {c.axes: c.sent for c in program.collectives({"fsdp": 2, "tensor": 2}) if c.kind == "all-reduce"}
    others = 2 * 32 if axes == ("tensor",) else 0  # the all-reduce of the two layers
    assert sent[axes] == expected + others
