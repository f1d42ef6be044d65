"""A memory that is kept: read in pieces or whole, saved, appended to, refused by others, and of use."""

import dataclasses
import functools
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.training.tiny import MODEL, tiny_config
from titans_jax import cli
from titans_jax.config import ModelConfig
from titans_jax.data import DataError, load_tokenizer
from titans_jax.inference import Generator, Memory, MemoryFileError, NotFiniteLogits, Reader, Sampling, command
from titans_jax.inference import reading as module
from titans_jax.inference.command import tenths
from titans_jax.training import Run, load_run, train
from titans_jax.training.run import init_model

TOKENIZER = load_tokenizer("byte")
TEXT = "It reads, it learns, it remembers. Naïve. " * 3


@functools.cache
def tiny(kind: str):
    """A block, or an lmm of a linear memory, which compiles in a third of the time."""
    memory = dataclasses.replace(MODEL.memory, preset="gated_deltanet" if kind == "linear" else "titans")
    pattern = ("lmm",) if kind == "linear" else (kind,)
    graphdef, params = init_model(dataclasses.replace(MODEL, pattern=pattern, depth=1, memory=memory), 0)
    return graphdef, jax.tree.map(lambda x: 3.0 * x, params)


@functools.cache
def reader(kind: str) -> Reader:
    return Reader(*tiny(kind), TOKENIZER)


def assert_same(one: Memory, other: Memory) -> None:
    """To rounding: another split of the same tokens is another order of the same sums."""
    assert (one.last, one.tokens, one.fingerprint) == (other.last, other.tokens, other.fingerprint)
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * max(1e-6, np.abs(np.asarray(b)).max()))


@pytest.mark.slow_but_for("linear")
@pytest.mark.parametrize("kind", ["linear", "lmm", "mac"])
def test_appending_to_a_saved_memory_is_reading_on(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SMALL_PIECES", (16, 1))
    ours = reader(kind)
    whole, loss = ours.read(ours.start(), ours.encode(TEXT))
    assert whole.tokens == loss.tokens == len(TEXT.encode()) and whole.last == ord(" ")
    first, cost = ours.read(ours.start(), ours.encode(TEXT[:41]))
    first.save(tmp_path / "a.memory")
    loaded = Memory.load(tmp_path / "a.memory", ours)
    for a, b in zip(jax.tree.leaves(first.state), jax.tree.leaves(loaded.state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype and a.shape == b.shape
    again, rest = ours.read(loaded, ours.encode(TEXT[41:], loaded))
    assert_same(again, whole)
    assert cost.nats + rest.nats == pytest.approx(loss.nats, rel=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["a.memory"]


def test_a_continuation_goes_on_from_the_memory():
    """Reading a text and then continuing nothing is continuing the text."""
    ours, generator = reader("linear"), Generator(tiny("linear")[0], TOKENIZER, Sampling(temperature=0))
    memory, _ = ours.read(ours.start(), ours.encode(TEXT[:50]))
    params = tiny("linear")[1]
    expected = list(generator.tokens(params, TEXT[:60], 12))
    assert list(generator.tokens(params, TEXT[50:60], 12, memory=memory)) == expected
    text = "".join(generator.stream(params, TEXT[50:60], 12, memory=memory))
    assert text == TOKENIZER.decode(expected)


def test_what_is_no_memory_of_this_model_is_refused(tmp_path):
    ours, file = reader("linear"), tmp_path / "a.memory"
    with pytest.raises(MemoryFileError, match="is no file; titans read RUN TEXT --memory makes one"):
        Memory.load(file, ours)
    file.write_bytes(b"something else")
    with pytest.raises(MemoryFileError, match="is damaged or no memory's file"):
        Memory.load(file, ours)
    graphdef, params = tiny("linear")
    other = Reader(graphdef, jax.tree.map(lambda x: x * 2, params), TOKENIZER)
    other.start().save(file)
    with pytest.raises(MemoryFileError, match="which another model has read .* use that model, or read the text"):
        Memory.load(file, ours)
    module.save_arrays({"anything": np.zeros(1)}, file, {"titans_jax_memory": '{"last": "1", "tokens": "2"}'})
    with pytest.raises(MemoryFileError, match="is damaged or no memory's file"):
        Memory.load(file, ours)
    other.start().save(file)
    whole = file.read_bytes()
    later = whole.replace(rb"\"format\": \"1\"", rb"\"format\": \"2\"")
    assert later != whole
    file.write_bytes(later)
    with pytest.raises(MemoryFileError, match="a file of format 2, and this version reads format 1; use the version"):
        Memory.load(file, other)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MemoryFileError, match="is damaged"):
        Memory.load(file, other)
    with pytest.raises(MemoryFileError, match="full attention, which keeps every token"):
        reader("attention")


def test_how_numbers_are_computed_is_not_part_of_the_fingerprint():
    config = dataclasses.replace(MODEL, pattern=("lmm",), depth=1)
    params = {"anything": np.ones(3, np.float32)}
    memory = dataclasses.replace(config.memory, form="associative", key_start="random")
    chunks = dataclasses.replace(config.memory, chunk_size=4)
    ours = module.fingerprint(config, params)
    assert module.fingerprint(dataclasses.replace(config, remat="full", memory=memory), params) == ours
    assert module.fingerprint(dataclasses.replace(config, memory=chunks), params) != ours
    assert module.fingerprint(config, {"anything": np.zeros(3, np.float32)}) != ours


def test_fields_that_came_later_leave_the_fingerprint_of_older_memories():
    """The number is what the version of 2026-11-22 made of it, before the fields were there."""
    params = {"anything": np.ones(3, np.float32)}
    absent = (
        "normalize_values value_skip tie_keys skip_projection prediction_gate cache_counted scale_keys orthogonal_start"
    ).split()
    before = dataclasses.replace(ModelConfig().memory, **dict.fromkeys(absent, False))
    assert module.fingerprint(ModelConfig(merge="product", memory=before), params) == "436b105a71ec2c94"
    others = {"omega_window": 4, "caching": "gated", "cache_segment": 64, "cache_restart": True, "cache_counted": True}
    others |= {"cache_segmentation": "logarithmic", "mimo_rank": 2}
    others |= dict.fromkeys(absent, True)
    others |= {"shared_gates": True, "channel_steps": "key", "gate_maps": "own", "start": "fixed"}
    for field, value in (others | {"local_chunks": (4,), "shard": 64}).items():
        memory = dataclasses.replace(before, **{field: value})
        assert module.fingerprint(ModelConfig(merge="product", memory=memory), params) != "436b105a71ec2c94"
    for fields in ({"merge": "residual"}, {"merge": "product", "mac_long_term": 8}):
        assert module.fingerprint(ModelConfig(memory=before, **fields), params) != "436b105a71ec2c94"


def test_a_memory_that_an_earlier_version_wrote_for_memora_still_fits(tmp_path, monkeypatch):
    """It stands under the fingerprint of a configuration without a word on the size of values, the skip, and where
    logits start."""

    def memora(**said):
        return dataclasses.replace(MODEL, memory=dataclasses.replace(MODEL.memory, preset="memora", **said))

    ours, file, params = reader("linear"), tmp_path / "a.memory", tiny("linear")[1]
    after = memora(normalize_values=False, value_skip=False)
    written = module.earlier_fingerprints(after, params)
    earlier = memora(), memora(value_skip=False), memora(normalize_values=False)
    assert sorted(written) == sorted(module.fingerprint(config, params) for config in earlier)
    assert module.fingerprint(after, params) not in written
    started = memora(normalize_values=True, value_skip=True, retention="kullback_leibler(start_deviation=1.0)")
    earlier = (memora(normalize_values=True, value_skip=True, retention=said) for said in (None, "kullback_leibler"))
    assert sorted(module.earlier_fingerprints(started, params)) == sorted(
        module.fingerprint(config, params) for config in earlier
    )
    assert module.earlier_fingerprints(memora(), params) == []
    assert module.earlier_fingerprints(dataclasses.replace(after, memory=MODEL.memory), params) == []
    monkeypatch.setattr(ours, "fingerprints", {"ours", *written})
    dataclasses.replace(ours.start(), fingerprint=written[0]).save(file)
    assert Memory.load(file, ours).tokens == 0


def test_a_memory_that_an_earlier_version_wrote_for_moneta_still_fits():
    """It stands under the fingerprint of a configuration that did not name the bias."""

    def moneta(bias):
        return dataclasses.replace(MODEL, memory=dataclasses.replace(MODEL.memory, preset="moneta", bias=bias))

    params = tiny("linear")[1]
    assert module.earlier_fingerprints(moneta("lp"), params) == [module.fingerprint(moneta(None), params)]
    assert module.earlier_fingerprints(moneta(None), params) == []


def test_a_memory_that_is_not_finite_takes_no_other_s_place(tmp_path, monkeypatch):
    """Neither where the logits are NaN, at the first piece of these, nor where only the state is."""
    monkeypatch.setattr(module, "SMALL_PIECES", (16, 1))
    (graphdef, params), file, text = tiny("linear"), tmp_path / "a.memory", tmp_path / "a.txt"
    text.write_text(TEXT)
    params = dict(params, head={"kernel": np.full_like(params["head"]["kernel"], np.nan)})
    run = Run(tiny_config(), TOKENIZER, graphdef, params, 7, tmp_path)
    ours = Reader(graphdef, params, TOKENIZER)
    memory = ours.start()
    memory.save(file)
    before = file.read_bytes()
    with pytest.raises(
        NotFiniteLogits, match="within the first 16 tokens are not finite, so no memory was written; a l"
    ):
        command.read(command.ReadOptions(tmp_path, (text,), file), run)
    state = jax.tree.map(lambda leaf: leaf * np.nan if leaf.dtype == np.float32 else leaf, memory.state)
    with pytest.raises(MemoryFileError, match="memory is '.*a.memory', and 0.* of what was read is NaN, so it was not"):
        dataclasses.replace(memory, state=state).save(file)
    assert file.read_bytes() == before and len([*tmp_path.iterdir()]) == 2


def test_bytes_that_are_no_text_are_read_as_in_training(tmp_path):
    """Refused, or with data.errors="replace" as U+FFFD, which has three bytes; no memory is begun before."""
    file, text, config = tmp_path / "a.memory", tmp_path / "a.txt", tiny_config()
    text.write_bytes(b"x\xff")
    run = Run(config, TOKENIZER, *tiny("linear"), 7, tmp_path)
    asked = command.ReadOptions(tmp_path, (text,), file)
    with pytest.raises(DataError, match="is not UTF-8 at byte 1"):
        command.read(asked, run)
    assert not file.exists()
    data = dataclasses.replace(config.data, errors="replace")
    command.read(asked, dataclasses.replace(run, config=dataclasses.replace(config, data=data)))
    assert Memory.load(file, reader("linear")).tokens == 4


def test_speeds_are_those_of_whole_pieces():
    """A thousand tokens a second; the first piece, and each smaller one at the end, waits 10 s for the compiler."""
    ends = [(0.0, 0), *((10.0 + n, 1000 * (n + 1)) for n in range(41)), (60.0, 41256), (70.0, 41272)]
    assert tenths(ends) == pytest.approx([1000.0] * 10)
    assert tenths(ends[:2]) == [100.0] and tenths(ends[:1]) == [0.0]


@pytest.mark.slow
def test_a_trained_model_reads_on_from_what_it_has_read(tmp_path, capsys, monkeypatch):
    """Two readings cost what one of both texts does; by the command too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = dataclasses.replace(MODEL, pattern=("lmm",), depth=1)
    config = tiny_config(model, steps=8, evaluate_every=8, diagnostics_every=8, checkpoint_every=8, sample_tokens=0)
    run_dir = tmp_path / "run"
    train(config, run_dir, Console(file=io.StringIO()))
    run = load_run(run_dir)
    ours = Reader(run.graphdef, run.params, run.tokenizer)
    text = (Path(config.data.path) / "scanner.py").read_text()
    memory, fresh = ours.read(ours.start(), ours.encode(text))
    _, again = ours.read(memory, ours.encode(text, memory))
    _, both = ours.read(ours.start(), ours.encode(text + text))
    assert fresh.nats + again.nats == pytest.approx(both.nats, rel=1e-4) and again.nats != fresh.nats

    file, book = str(tmp_path / "book.memory"), tmp_path / "book.txt"
    book.write_text(text)
    capsys.readouterr()
    assert cli.main(["read", str(run_dir), str(book), "--memory", file]) == 0
    assert f"the memory of {len(text.encode()):,} tokens is in {file}" in capsys.readouterr().out
    assert cli.main(["read", str(run_dir), str(book), "--memory", file]) == 0
    assert f"the memory of {2 * len(text.encode()):,} tokens is in {file}" in capsys.readouterr().out
    asked = ["generate", str(run_dir), "--memory", file, "--prompt", "é\udcff", "--max_tokens", "8", "--samples", "2"]
    assert cli.main([*asked, "--stop", "\n", "--min_p", "0.1", "--repetition_penalty", "1.2", "--speed"]) == 0
    out = capsys.readouterr().out
    assert "--- sample 2 of 2, seed 1\né?" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("def \nclass \n\n"))
    assert cli.main(["generate", str(run_dir), "--interactive", "--max_tokens", "4"]) == 0
    assert capsys.readouterr().out.count("> ") == 3
    (tmp_path / "prompt.txt").write_bytes("é".encode() + b"\xff")
    in_file = ["generate", str(run_dir), "--memory", file, "--prompt_file", str(tmp_path / "prompt.txt")]
    assert cli.main([*in_file, "--max_tokens", "8"]) == 0
    from_file = capsys.readouterr().out
    assert cli.main(asked[:8]) == 0
    assert capsys.readouterr().out == from_file and from_file.startswith("é?")
    assert cli.main([*in_file, "--prompt", "x"]) == 2
    assert "prompt and prompt_file are both given; use one of them" in capsys.readouterr().err
    assert cli.main(["generate", str(run_dir), "--prompt_file", str(tmp_path / "nowhere")]) == 2
    assert "nowhere', which is no file; give a text file" in capsys.readouterr().err
    assert Path(file).stat().st_mode == book.stat().st_mode
    assert cli.main(["read", str(run_dir), str(tmp_path / "nowhere")]) == 2
    assert "nowhere', which is no file; give text files" in capsys.readouterr().err
