"""`titans study language`, `depth`, `pq`, `yaad` and `lengths`: their rows, their numbers, and one model of each."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tiny_studies import LANGUAGE

from titans_jax import cli
from titans_jax.config import ConfigError, ModelConfig, memory_rule
from titans_jax.data import load_tokenizer
from titans_jax.studies import STUDIES, run, tasks
from titans_jax.studies.language import MODELS, LanguageOptions, LanguageStudy, texts
from titans_jax.studies.length import LengthOptions, languages
from titans_jax.studies.tasks import _bytes_per_word, _words_begun
from titans_jax.studies.variants import VariantOptions, mean_to
from titans_jax.training.run import count_params

SMALL = {"dim": 8, "depth": 1, "head_dim": 4, "seeds": 1, "language": LANGUAGE}


def cells_of(name, **fields):
    return STUDIES[name]().cells(VariantOptions(**SMALL | fields))


def finish(name, options, cells, folder):
    study = STUDIES[name]()
    run.run(run.Plan(name, study, options, cells, folder, f"titans study {name}"))
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / f"{name}.json").read_text())


def test_what_the_variants_are():
    rules = {name: [memory_rule(cell.model.memory) for cell in cells_of(name)] for name in ("depth", "pq", "yaad")}
    assert [len(rule.shapes(8)) for rule in rules["depth"]] == [1, 2, 3, 4]
    labels = [tuple(cell.labels.values()) for cell in cells_of("pq")]
    assert labels == [(p, 4.0) for p in (1, 1.5, 2, 2.8, 3, 3.2, 4)] + [(3.0, q) for q in (2, 3, 5)]
    assert [rule.bias.p for rule in rules["pq"][:3]] == [1.0, 1.5, 2.0]
    assert len(set(rules["yaad"])) == 5  # forgetting is a gate, not a part of the rule
    full, *others = cells_of("yaad")
    assert [cell.labels["variant"] for cell in others] == [
        "without retention", "constant threshold", "without L2", "without L1", "linear memory"
    ]  # fmt: skip
    assert others[0].model.memory.forget == "never" and rules["yaad"][-1].architecture.linear


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depth", "pq", "yaad"])
def test_variants_have_as_many_parameters(name):
    cells = run.checked_cells(STUDIES[name](), VariantOptions(**SMALL | {"dim": 16}))
    counts = [count_params(cell.model) for cell in cells]
    assert max(counts) - min(counts) <= 3 * 16


def test_the_mean_over_the_first_tokens():
    ends, means = [4, 8, 16], [4.0, 2.0, 1.0]
    assert mean_to(4, ends, means) == 4 and mean_to(8, ends, means) == 3
    assert mean_to(16, ends, means) == pytest.approx((16 + 8 + 8) / 16)
    assert mean_to(12, ends, means) is None and mean_to(8, ends, [4.0, None, 1.0]) is None
    assert mean_to(8, None, None) is None


@pytest.mark.exhaustive  # test_one_variant_end_to_end sees one of them
@pytest.mark.slow
@pytest.mark.parametrize("name", ["depth", "pq", "yaad"])
def test_every_variant_trains(name, tmp_path):
    options = VariantOptions(**SMALL)
    cells = cells_of(name)
    saved = finish(name, options, cells, tmp_path)
    assert all(row["failed"] == 0 for row in saved["rows"]) and len(saved["rows"]) == len(cells)
    for row in saved["rows"]:
        numbers = row["numbers"]
        assert numbers["to_16"]["mean"] == pytest.approx(numbers["carried"][0]["mean"])


def test_one_variant_end_to_end(tmp_path):
    cells = cells_of("depth")[:1]
    (row,) = finish("depth", VariantOptions(**SMALL), cells, tmp_path)["rows"]
    carried = [bucket["mean"] for bucket in row["numbers"]["carried"]]
    assert row["numbers"]["to_32"]["mean"] == pytest.approx((carried[0] + carried[1]) / 2)
    assert row["numbers"]["to_64"]["mean"] == pytest.approx((carried[0] + carried[1] + 2 * carried[2]) / 4)


def test_lengths_have_as_many_tokens_a_step():
    every = languages(LengthOptions(rows=(16, 32, 8), language=LANGUAGE))
    assert [(one.sequence_length, one.batch_size) for one in every] == [(16, 2), (32, 1), (8, 4)]
    study = STUDIES["lengths"]()
    options = study.defaults(LengthOptions())
    assert {one.sequence_length * one.batch_size for one in languages(options)} == {512 * 64}
    alone = {"presets": ("titans",), "blocks": ("lmm",), "reference": ()}
    cells = study.cells(LengthOptions(rows=(16, 32), head_dim=4, dim=8, depth=1, seeds=1, language=LANGUAGE, **alone))
    assert [cell.labels["rows"] for cell in cells] == [16, 32] and cells[0].model == cells[1].model


def test_rows_of_all_lengths_are_measured_on_the_same_text():
    """And where one length is given, and nothing compared, on rows that are drawn one by one."""
    every = languages(LengthOptions(rows=(16, 32, 8), language=LANGUAGE))
    tokens = [np.concatenate([batch["tokens"].ravel() for batch in one._held_out()]) for one in every]
    assert len(tokens[0]) == 32 * LANGUAGE.evaluation_batches
    np.testing.assert_array_equal(tokens[0], tokens[1])
    np.testing.assert_array_equal(tokens[0], tokens[2])
    (alone,) = languages(LengthOptions(language=LANGUAGE))
    assert alone == LANGUAGE


@pytest.mark.parametrize("name, pattern", [("window", ("window",)), ("samba", ("samba", "window"))])
def test_a_block_without_memory_has_as_many_parameters(name, pattern):
    options = LengthOptions(
        presets=("titans",), reference=(name,), blocks=("mal",), dim=16, head_dim=8, depth=2, seeds=1
    )
    cells = run.checked_cells(STUDIES["length"](), dataclasses.replace(options, language=LANGUAGE))
    assert [(cell.labels["block"], cell.labels["preset"]) for cell in cells] == [("mal", "titans"), ("", name)]
    assert cells[1].model.pattern == pattern and cells[1].model.window == cells[0].model.window
    counts = [count_params(cell.model) for cell in cells]
    assert abs(counts[0] - counts[1]) <= 2 * 3 * 16


def test_widths_and_scales_of_lengths_are_those_of_its_models():
    options = dataclasses.replace(LengthOptions(), reference=("window",), language=LANGUAGE, seeds=1)
    said = dataclasses.replace(options, hidden_dim=24, embedding_scale=8.0)
    models = [cell.model for cell in STUDIES["length"]().cells(said)]
    assert {(model.hidden_dim, model.embedding_scale) for model in models} == {(24, 8.0)}
    plain = [cell.model for cell in STUDIES["length"]().cells(options)]
    assert plain == [dataclasses.replace(model, hidden_dim=None, embedding_scale=1.0) for model in models]


def test_lengths_that_do_not_divide_a_step_are_refused(capsys, tmp_path):
    assert cli.main(["study", "lengths", "--rows", "500", "--output", str(tmp_path / "out")]) == 2
    assert (
        "rows has 500; use divisors of 32,768, the tokens of language.batch_size rows of 512" in capsys.readouterr().err
    )


@pytest.mark.parametrize("field", ["language.data.sequence_length", "language.batch_size"])
@pytest.mark.parametrize("study", ["length", "lengths"])
def test_a_step_without_tokens_is_refused_by_the_name_of_its_field(capsys, tmp_path, study, field):
    assert cli.main(["study", study, f"--{field}", "0", "--output", str(tmp_path / "out")]) == 2
    assert f"titans: {field} is 0; use at least 1\n" == capsys.readouterr().err


def test_the_models_of_the_papers_are_equally_large():
    options = LanguageOptions(texts=("python",), dim=64, head_dim=16, depth=2, segment=32, sequence_length=64, seeds=1)
    cells = run.checked_cells(LanguageStudy(), options)
    assert [cell.labels["model"] for cell in cells] == list(MODELS)
    counts = {cell.labels["model"]: count_params(cell.model) for cell in cells}
    mamba = counts.pop("Mamba")
    assert max(counts.values()) - min(counts.values()) <= 2 * 3 * 64
    block = 6 * 64**2 + 128 * (2 * 4 + 32) + 128 * (16 + 2 + 4 + 1) + 64  # Mamba is sized by whole blocks
    assert abs(mamba - max(counts.values())) <= block / 2


def test_a_preset_is_a_row_of_its_own_as_an_lmm():
    options = LanguageOptions(quick=True, texts=("python",), models=("omeganet", "titans", "Titans LMM"), seeds=1)
    omega, by_preset, by_name = LanguageStudy().cells(dataclasses.replace(options, equal_parameters=False))
    assert omega.labels["model"] == "omeganet"
    assert (omega.model.memory.preset, omega.model.pattern) == ("omeganet", ("lmm",))
    assert by_preset.model == by_name.model


def test_later_models_have_their_own_blocks():
    options = LanguageOptions(texts=("python",), models=("Hope", "Hope-Attention*", "LaCT*"), seeds=1)
    made = [(cell.model.memory.preset, cell.model.pattern) for cell in LanguageStudy().cells(options)]
    assert made == [("hope", ("hope",)), ("hope", ("hope_attention",)), ("lact", ("mag",))]


def test_word_perplexity_is_two_to_the_bits_of_a_word_of_what_is_read():
    """Bytes and words counted one by one in the held-out rows: a word begins after a blank or a document."""
    num_bytes = words = 0
    for batch in LANGUAGE._held_out():
        for before, here in zip(batch["tokens"].ravel().tolist(), batch["targets"].ravel().tolist(), strict=True):
            num_bytes += 0 <= here < 256
            blank = lambda byte: chr(byte).isspace() or byte == 256  # noqa: E731
            words += here >= 0 and blank(before) and not blank(here)
    assert num_bytes > 20 and words > 1  # two rows of sixteen tokens
    by_word = LANGUAGE._by_word(2.0)
    assert by_word["bits_per_byte"] == 2.0
    assert math.log2(by_word["word_perplexity"]) == pytest.approx(2 * num_bytes / words)


def test_words_that_begin_in_a_row():
    tokenizer = load_tokenizer("byte")
    mark = tokenizer.eos_id
    for before, targets, expected in (
        (mark, b"the cat ", 2), (ord("t"), b"he cat", 1), (ord(" "), b"the", 1), (ord("e"), b" ", 0),
        (ord("a"), [*b"b", mark, *b"c d"], 2),
    ):  # fmt: skip
        assert _words_begun(before, np.array([*targets]), tokenizer) == expected


@pytest.mark.exhaustive  # test_one_variant_end_to_end sees another study of language
@pytest.mark.slow
def test_language_end_to_end(tmp_path):
    options = LanguageOptions(
        texts=("python",), models=("Transformer++", "Titans MAC*"), dim=8, head_dim=4, depth=1, segment=16, seeds=1
    )
    study = LanguageStudy()
    task = dataclasses.replace(LANGUAGE, positions=0)
    cells = [dataclasses.replace(cell, task=task) for cell in study.cells(options)]
    saved = finish("language", options, cells, tmp_path)
    for row in saved["rows"]:
        numbers = row["numbers"]
        expected = 2 ** (numbers["bits_per_byte"]["mean"] * _bytes_per_word(task))
        assert numbers["word_perplexity"]["mean"] == pytest.approx(expected)
    assert saved["baselines"][0]["word_perplexity"] > 1


def test_texts_are_where_they_are_said_to_be_packed_or_not(tmp_path):
    """As `titans data fetch` writes them, and as shared/data has them; what is missing is named as fetched."""
    assert LanguageOptions().folder == "data"
    for ending in ("", ".xz"):
        at = tmp_path / f"data{ending}"
        files = [
            at / f"{file}{ending}"
            for file in ("books/valid.jsonl", "wikitext-2/wiki.train.tokens", "wikitext-2/wiki.valid.tokens")
        ]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")
        every = texts(str(at), "byte", 64)
        wiki = every["wikitext"]
        assert [every["books"].validation_path, wiki.path, wiki.validation_path] == [str(file) for file in files]
    every = texts("/data", "byte", 64)
    assert every["books"].path == "/data/books" and every["wikitext"].path == "/data/wikitext-2/wiki.train.tokens"
    assert {one.packing for one in every.values()} == {"stream"}


def test_what_the_notes_say_of_the_text():
    notes = LanguageStudy().notes(LanguageOptions())
    assert "tokenised text with <unk>" in notes
    assert "<unk>" not in LanguageStudy().notes(LanguageOptions(texts=("books",)))
    for name, options in (("length", LengthOptions()), ("depth", VariantOptions())):
        assert "stretches of the held-out text, across documents" in STUDIES[name]().notes(options)


def test_a_text_without_text_is_a_sentence(capsys, tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("")
    source = f"--language.data.source text --language.data.path {tmp_path}"
    assert cli.main(["study", "depth", "--quick", *source.split(), "--output", str(tmp_path / "out")]) == 2
    assert f"the train documents of data.path='{tmp_path}' hold no text: give more of it" in capsys.readouterr().err


def test_mistakes_end_in_one_sentence(capsys, tmp_path):
    for arguments, message in (
        ("--models Titan", "models has 'Titan'; did you mean "),
        ("--texts poems", "texts has 'poems'; use books, wikitext, python"),
        ("--folder /nowhere --texts books --models Transformer++", "'/nowhere/books'"),
    ):
        assert cli.main(["study", "language", *arguments.split(), "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"data": dataclasses.replace(LANGUAGE.data, source="tokens")}, "data.source is 'tokens'; use a text, which"),
        ({"data": dataclasses.replace(LANGUAGE.data, mixture=("a=1",))}, r"data.mixture is \('a=1',\); use a text"),
        (
            {"batch_size": 1 << 20},
            "batch_size is 1048576; use at most .*, the rows of 16 tokens that the training text",
        ),
    ],
)
def test_texts_that_would_not_be_read_as_they_are_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LANGUAGE, **fields).check(ModelConfig())


def test_a_text_without_blanks_has_no_word_perplexity(monkeypatch):
    monkeypatch.setattr(tasks, "_bytes_per_word", lambda task: 500.0)
    assert LANGUAGE._by_word(1.5)["word_perplexity"] == 2.0**750
    assert LANGUAGE._by_word(3.0) == {"bits_per_byte": 3.0}


def test_a_preset_that_no_row_would_have_is_refused():
    memory = dataclasses.replace(VariantOptions().memory, preset="yaad")
    with pytest.raises(ConfigError, match="memory.preset is 'yaad'; leave it out"):
        cells_of("depth", memory=memory)
    assert len(cells_of("yaad", memory=memory)) == 6
    with pytest.raises(ConfigError, match="memory.preset is 'yaad'; leave it out"):
        LanguageStudy().cells(LanguageOptions(quick=True, texts=("python",), memory=memory))
