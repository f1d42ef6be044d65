import numpy as np
import pytest

from titans_jax.data import load_tokenizer
from titans_jax.training.run import copy_files

TEXTS = ["", "plain", "  two spaces\n\ttab\r\n", "naïve 日本語 🎉 \x00 end", "<s> </s>", "e\u0301"]


@pytest.fixture(scope="module")
def mistral(shared_data):
    return load_tokenizer(str(shared_data / "tokenizers/mistral-v1/tokenizer.model"))


@pytest.fixture(params=["byte", "sentencepiece"])
def tokenizer(request):
    return load_tokenizer("byte") if request.param == "byte" else request.getfixturevalue("mistral")


@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


def test_ids_fit_the_vocabulary_and_never_hold_the_border(tokenizer):
    ids = tokenizer.encode("".join(TEXTS) * 3)
    assert 0 <= ids.min() and ids.max() < tokenizer.vocab_size
    assert tokenizer.eos_id not in ids
    assert 0 <= tokenizer.eos_id == tokenizer.bos_id < tokenizer.vocab_size


def test_decoding_leaves_out_borders_and_ids_a_padded_vocabulary_adds(tokenizer):
    ids = tokenizer.encode("whole").tolist()
    assert tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.vocab_size, tokenizer.vocab_size + 60]) == "whole"


def test_a_prefix_of_the_ids_decodes_to_a_prefix_of_the_text(tokenizer):
    """What streaming relies on: nothing that was printed is taken back, unless it is an unfinished character."""
    text = "naïve 日本語 🎉🦕𓀀 end"
    ids = tokenizer.encode(text)
    prefixes = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert all(text.startswith(prefix.rstrip("\N{REPLACEMENT CHARACTER}")) for prefix in prefixes)
    assert any(prefix.endswith("\N{REPLACEMENT CHARACTER}") for prefix in prefixes)


def test_bytes_are_the_ids():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_half_a_surrogate_pair_is_no_crash(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"


def test_bytes_a_token_of_the_raw_wikitext_test(shared_data, mistral):
    """shared/data/README.md states 3.92 for this tokenizer and text."""
    import lzma

    content = lzma.open(shared_data / "wikitext-2/wiki.test.raw.xz").read()
    assert len(content) / len(mistral.encode(content.decode())) == pytest.approx(3.92, abs=0.005)


@pytest.mark.parametrize("content", [None, b"no model"])
def test_a_wrong_tokenizer_is_refused(tmp_path, refused, content):
    path = tmp_path / "x.model"
    if content:
        path.write_bytes(content)
    with refused("data.tokenizer", str(path), "'byte'", "SentencePiece", "tokenizer.json"):
        load_tokenizer(str(path))


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A function from special tokens to the path of a small tokenizer.json with all bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def make(*special):
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
        )
        model.train_from_iterator(["it reads, it learns, it remembers"] * 4, trainer)
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        model.save(str(path))
        return path

    return make


def test_a_tokenizer_of_hugging_face(hugging_face):
    tokenizer = load_tokenizer(str(hugging_face("<s>", "</s>")))
    assert tokenizer.eos_id == 1 and len(tokenizer.encode("it reads")) < 8
    for text in [*TEXTS, "a\ud83db"]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and tokenizer.eos_id not in ids and ids.max(initial=0) < tokenizer.vocab_size
        assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.vocab_size]) == text.replace("\ud83d", "?")


def test_its_end_of_document_is_the_one_that_is_said(hugging_face, refused, tmp_path):
    path = hugging_face("<begin>", "<over>")
    with refused("data.tokenizer=", "no token to put between documents", "tokenizer_config.json"):
        load_tokenizer(str(path))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": {"content": "<over>"}, "chat_template": "x"}')
    assert load_tokenizer(str(path)).eos_id == 1
    copy_files(str(path), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).eos_id == 1


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_wrong_file_of_hugging_face_is_refused(tmp_path, refused, content):
    path = tmp_path / "tokenizer.json"
    if content:
        path.write_text(content)
    with refused("data.tokenizer", str(path), "'byte'"):
        load_tokenizer(str(path))
