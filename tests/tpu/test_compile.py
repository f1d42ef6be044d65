"""Training steps compiled by the TPU compiler, for machines that are not there."""

import dataclasses
import json

import pytest

from titans_jax import cli
from titans_jax.config import Config, DataConfig, MemoryConfig, MeshConfig, ModelConfig
from titans_jax.tpu import command
from titans_jax.tpu import compile as compile_module
from titans_jax.tpu.compile import DoesNotFit, compile_step, nearest_fit
from titans_jax.tpu.topology import find_topology
from titans_jax.training.run import count_params

pytest.importorskip("libtpu", reason="libtpu, which holds the TPU compiler, is not installed")

LMM = Config(
    model=ModelConfig(
        pattern=("lmm",),
        dim=128,
        depth=2,
        num_heads=2,
        head_dim=64,
        num_persistent=0,
        memory=MemoryConfig(depth=1, chunk_size=64),
    ),
    data=DataConfig(sequence_length=256, batch_size=4),
    mesh=MeshConfig(data=1, fsdp=2, tensor=2),
)
TRANSFORMER = dataclasses.replace(
    LMM, model=dataclasses.replace(LMM.model, pattern=("attention",)), mesh=MeshConfig(data=1, fsdp=-1)
)


def with_model(config: Config, **fields) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


def with_rows(config: Config, rows: int) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows))


@pytest.fixture(scope="module")
def lmm():
    return compile_step(LMM, find_topology("v5e:2x2"))


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_what_a_chip_holds(lmm):
    """Matrices lie in quarters, what heads own in halves, vectors whole; AdamW keeps two moments and two counters."""
    parameters, state = lmm.hbm["parameters"], lmm.hbm["optimizer state"]
    total = 4 * count_params(LMM.model)
    assert total / 4 < parameters < total / 3
    assert state == 2 * parameters + 2 * 4
    assert lmm.hbm["batch"] == 3 * 4 * (4 // 2) * 256
    assert lmm.topology.generation.hbm - sum(lmm.hbm.values()) == lmm.headroom
    assert lmm.host == 0


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_estimate_is_of_this_step(lmm):
    assert lmm.unknown_loops == 0
    assert any(source.startswith("memory/") for source in lmm.cycles) and "layers/feed_forward" in lmm.cycles
    assert 0 < lmm.utilisation < 1
    assert lmm.tokens_per_second * lmm.step_seconds == pytest.approx(4 * 256 / 4)
    assert any("collectives" in sentence for sentence in lmm.leaves_out)
    assert lmm.kernels.calls == lmm.kernels.scheduled > 0
    assert set(lmm.kernels.cycles) == {"memorize", "memorize_states", "memorize_backward"}
    assert 0 < lmm.kernel_share < 1


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_no_collective_runs_per_chunk(lmm):
    """Twice as many chunks, and no collective more: gradients of what rows share are summed once, behind the kernel."""
    longer = dataclasses.replace(LMM, data=dataclasses.replace(LMM.data, sequence_length=512))
    longer = compile_step(longer, find_topology("v5e:2x2"))
    calls = [sum(collective.calls for collective in report.collectives) for report in (lmm, longer)]
    assert calls[1] == calls[0]
    for kernel, cycles in lmm.kernels.cycles.items():  # twice the steps, and code that fetches one during another
        assert longer.kernels.cycles[kernel] > 1.9 * cycles


@pytest.mark.exhaustive  # a cost and no number: two of the slowest compilations here
@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_segment_of_mac_runs_its_kernels_at_most_twice_forward():
    """Remat full repeats a layer; of a segment, which is repeated in that, what its kernels leave is kept."""
    once, repeated = (
        compile_step(with_model(LMM, pattern=("mac",), segment=128, remat=remat), find_topology("v5e:2x2"))
        for remat in ("none", "full")
    )
    assert repeated.kernels.calls == repeated.kernels.scheduled
    assert "layers/attention/xla" not in repeated.cycles
    for kernel in ("memorize", "segment_attention"):
        assert 1 < repeated.kernels.cycles[kernel] / once.kernels.cycles[kernel] < 2.5  # the schedules differ a little


@pytest.mark.exhaustive  # abstract_state makes both alike
@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_an_average_of_the_parameters_takes_as_much_as_they_do(lmm):
    averaged = dataclasses.replace(LMM, optimizer=dataclasses.replace(LMM.optimizer, ema=0.99))
    report = compile_step(averaged, find_topology("v5e:2x2"))
    assert report.hbm["average of the parameters"] == report.hbm["parameters"] == lmm.hbm["parameters"]
    assert lmm.hbm["average of the parameters"] == 0


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_only_gradients_cross_slices():
    report = compile_step(with_rows(TRANSFORMER, 8), find_topology("v6e:2x2", slices=2))
    assert report.mesh == {"slice": 2, "data": 1, "fsdp": 4, "tensor": 1}
    across = [collective for collective in report.collectives if "slice" in collective.axes]
    shard = report.hbm["parameters"]
    assert shard / 2 < sum(collective.sent for collective in across) < 2 * shard
    assert sum(c.sent for c in report.collectives if c.axes == ("fsdp",)) > shard


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_gradients_cross_slices_once_a_step():
    """However many microbatches they are the sum of; heads, widths and rows are spread inside each slice."""
    sent = []
    for parts in (1, 4):
        training = dataclasses.replace(LMM.training, gradient_accumulation=parts)
        config = dataclasses.replace(with_rows(LMM, 16), training=training)
        report = compile_step(config, find_topology("v5e:2x2", slices=2))
        assert report.kernels.calls > 0
        across = [collective for collective in report.collectives if "slice" in collective.axes]
        assert {collective.kind for collective in across} == {"all-reduce"}
        sent.append(sum(collective.sent for collective in across))
    shard = report.hbm["parameters"]
    assert sent[0] == sent[1] and shard / 2 < sent[1] < 2 * shard


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_offload_puts_the_named_activations_into_the_hosts_memory():
    config = with_model(TRANSFORMER, remat="offload")
    report = compile_step(config, find_topology("v5e:1x1"))
    queries_keys_values_reads = 4 * 4 * 256 * 128 * 2  # rows, tokens, width, bytes
    assert report.host == config.model.depth * queries_keys_values_reads


FILE = """
from titans_jax.config import Config, DataConfig, MeshConfig, ModelConfig
config = Config(
    model=ModelConfig(pattern=("attention",), dim=128, depth=1, num_heads=2, head_dim=64),
    data=DataConfig(source="jsonl", sequence_length=256, batch_size=64), mesh=MeshConfig(topology="v5litepod-1"),
)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "big.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused(file, capsys):
    """16 GiB of embedding, without gradients and moments, on 15.75: no batch helps."""
    shape = "--model.vocab_size 33554432 --model.dim 128 --batch 1 --data.sequence_length 16"
    assert cli.main(["compile", file, *shape.split()]) == 2
    sentence = capsys.readouterr().err
    assert "does not fit v5e:1x1: it needs at least" in sentence
    assert "one row at a time on a chip does not either: use a larger slice" in sentence


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_without_an_estimate_it_says_what_a_chip_holds(file, capsys):
    """The same bytes and collectives as with one. (All that one process compiles has schedules, or nothing has.)"""
    reports = {}
    for estimate in (True, False):
        assert cli.main(["compile", file, "--batch", "1", "--json", "--estimate", str(estimate)]) == 0
        reports[estimate] = json.loads(capsys.readouterr().out)
    assert reports[False]["estimate"] is None and reports[True]["estimate"]["step_seconds"] > 0
    assert all(reports[False][name] == reports[True][name] for name in ("hbm", "collectives", "flops"))
    assert cli.main(["compile", file, "--batch", "1", "--estimate", "False"]) == 0
    said = capsys.readouterr().out
    assert "headroom" in said and "estimate" not in said


def test_a_kernel_that_does_not_fit_is_told_in_a_sentence():
    """Of what libtpu 0.0.40 said of heads of 256, shortened."""
    said = (
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating "
        "on stack for %memorize_backward.3 = (bf16[1,8,16,2048]{3,2,1,0:T(8,128)(2,1)}) custom-call(%bitcast.3985).\n"
        "Scoped allocation with size 110.26M and limit 102.40M exceeded scoped vmem limit by 7.86M. It should not be"
    )
    refused = compile_module._refusal(
        RuntimeError(said), with_model(TRANSFORMER, head_dim=256), find_topology("v5e:1x1")
    )
    assert str(refused) == (
        "model.head_dim is 256, with which the kernel memorize_backward needs 110.26 MiB of a core's VMEM on v5e:1x1, "
        "where it may use 102.40; use a smaller one, or model.memory.form chunked"
    )
    assert not isinstance(refused, DoesNotFit)  # no other number of rows would help


@pytest.mark.parametrize(
    "remat, rows_that_fit, advice",
    [
        ("none", 64, "--model.remat full"),
        ("none", 20, "--model.remat full --training.gradient_accumulation 4"),
        ("full", 32, "--training.gradient_accumulation 2"),
        ("full", 1, "--training.gradient_accumulation 64"),
        ("full", 0, None),
    ],
)
def test_the_nearest_that_fits(monkeypatch, remat, rows_that_fit, advice):
    """As many rows at once as can be, by a compiler to which every row costs the same with remat full."""
    tried = []

    def compiler(config, topology):
        rows = 64 // config.training.gradient_accumulation
        tried.append(rows)
        if config.model.remat != "full" or rows > rows_that_fit:
            raise DoesNotFit("too large", topology.generation.hbm * rows / max(rows_that_fit, 0.5))

    monkeypatch.setattr(compile_module, "compile_step", compiler)
    config = with_model(with_rows(TRANSFORMER, 64), remat=remat)
    topology = find_topology("v5e:1x1")
    found = nearest_fit(config, topology, topology.generation.hbm * 64 / max(rows_that_fit, 0.5))
    assert (found and command.advice(config, found)) == (advice and f"{advice} fits")
    assert len(tried) <= 2  # what cannot fit by its size is not compiled


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--topology v5e:2x3", "there is no topology v5e:2x3; the nearest is v5e:2x2 (v5litepod-4)"),
        ("--topology v5e:2x2 --batch 7", "data.batch_size is 7, cut into 1 by training.gradient_accumulation"),
        ("--topology v5e:2x2 --mesh.fsdp 3", "mesh data=-1, fsdp=3, tensor=1, slice=1 does not fit 4 devices"),
        ("--topology v5e:2x2 --mesh.slice 3", "mesh.slice is 3, and --slices 1; leave mesh.slice out"),
        ("--topology v5e:2x2 --mesh.tensor 4", "model.num_heads is 2, which mesh.tensor 4 does not divide; use"),
        ("--mesh.topology None", "mesh.topology of big is None; name a slice, such as --topology v5e:2x4"),
        ("--slice 2", "there is no field slice"),
        ("--topology v5e:2x2 --estimate False --compare x", "estimate is False, and compare and scaling are of"),
    ],
)
def test_mistakes_are_refused_before_anything_is_compiled(file, arguments, message, capsys):
    assert cli.main(["compile", file, *arguments.split()]) == 2
    assert message in capsys.readouterr().err
