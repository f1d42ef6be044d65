"""Checkpoints without a training: what is written, what is found damaged, what is refused, and old ones."""

import json
import lzma
import shutil
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import titans_jax
from tests.training.tiny import assert_every_file_has_a_checksum, tiny_config
from titans_jax.config import ConfigError, to_dict
from titans_jax.training import load_run
from titans_jax.training.checkpoint import (
    COMMITTED,
    FORMAT,
    CheckpointError,
    Checkpoints,
    NotFinite,
    _cause,
    abstract_like,
)
from titans_jax.training.checksums import NAME
from titans_jax.training.loop import check_folder
from titans_jax.training.optimizer import make_optimizer

CONFIG = tiny_config()
STATE = {"params": {"w": jnp.arange(3000.0)}, "optimizer": {"count": jnp.zeros((), jnp.int32)}}
BESIDE = {"data_position": {"next_row": 8}, "text": {"train": {}}, "goodput": {"first_start": 0.0, "seconds": 1.0}}


def save(run_dir: Path, *steps: int, config=CONFIG) -> Path:
    """Checkpoints of `STATE`; their folder."""
    with Checkpoints(run_dir / "checkpoints", kept=len(steps)) as checkpoints:
        for step in steps:
            checkpoints.save(step, STATE, config, **BESIDE)
    return run_dir / "checkpoints"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run"), 4, 8).parent


@pytest.fixture
def run_dir(written, tmp_path) -> Path:
    """A copy of a run folder with checkpoints of steps 4 and 8."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def restore(run_dir: Path, resume_from=None):
    """The step that is gone on from, and what was said."""
    said = []
    with Checkpoints(run_dir / "checkpoints", say=said.append) as checkpoints:
        state, saved = checkpoints.restore(abstract_like(STATE), resume_from)
    np.testing.assert_array_equal(state["params"]["w"], STATE["params"]["w"])
    return saved.step, said


def change_run(run_dir: Path, step: int, change) -> None:
    """Let `change` alter what a checkpoint of an earlier version, without checksums, holds beside its arrays."""
    folder = run_dir / "checkpoints" / str(step)
    (folder / NAME).unlink(missing_ok=True)
    (file,) = [file for file in (folder / "run").rglob("*") if file.is_file() and b"config" in file.read_bytes()]
    run = json.loads(file.read_text())
    change(run)
    file.write_text(json.dumps(run))


def test_a_last_file_makes_a_checkpoint_where_folders_cannot_be_renamed(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, kept=3, commit="file") as checkpoints:
        for step in (4, 8, 12):
            checkpoints.save(step, STATE, CONFIG, **BESIDE)
    assert_every_file_has_a_checksum(folder / "12")
    assert restore(tmp_path) == (12, [])
    # A save that was ended before its last file, and one that was ended before that.
    (folder / "12" / COMMITTED).unlink()
    (folder / "8" / COMMITTED).unlink()
    shutil.rmtree(folder / "8" / "run")
    with Checkpoints(folder) as reader:
        assert reader.steps() == [4]
    with Checkpoints(folder, kept=3, say=(said := []).append, commit="file") as checkpoints:
        state, saved = checkpoints.restore(abstract_like(STATE))
        checkpoints.save(8, STATE, CONFIG, **BESIDE)
    assert saved.step == 4 and said == [
        f"the checkpoint of step {step} was not finished; using the one of step 4" for step in (8, 12)
    ]
    assert restore(tmp_path) == (8, []) and not (folder / "12").exists()


def test_what_is_beside_the_arrays(run_dir):
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        saved = checkpoints.latest()
    assert (saved.step, saved.config, saved.data) == (8, CONFIG, {"next_row": 8})
    assert (saved.text, saved.goodput) == (BESIDE["text"], BESIDE["goodput"])
    said = []
    change_run(run_dir, 8, lambda run: said.append((run["format"], run["version"])))
    assert said == [(FORMAT, titans_jax.__version__)]


def test_every_file_has_a_checksum(written):
    """Every file of an item: Orbax changes none of them later."""
    for step in ("4", "8"):
        assert_every_file_has_a_checksum(written / "checkpoints" / step)


@pytest.mark.parametrize("item", ["params", "optimizer", "run"])
def test_a_flipped_byte_is_found(run_dir, item):
    file = max((file for file in (run_dir / "checkpoints" / "8" / item).rglob("*") if file.is_file()), key=size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    step, (said,) = restore(run_dir)
    assert step == 4 and said.startswith("the checkpoint of step 8 cannot be read (")
    assert said.endswith("; using the one of step 4")
    if item != "run":  # Orbax itself may refuse what is no JSON any more
        assert f"{item}/" in said and "is not what was written: " in said


def size(file: Path) -> int:
    return file.stat().st_size


def test_a_missing_file_and_damaged_checksums_are_found(run_dir):
    next(file for file in (run_dir / "checkpoints" / "8" / "params").rglob("*") if file.is_file()).unlink()
    (run_dir / "checkpoints" / "4" / NAME).write_text("[")
    with Checkpoints(run_dir / "checkpoints", say=(said := []).append) as checkpoints:
        with pytest.raises(CheckpointError, match="none of the checkpoints in .* can be read; start in another run"):
            checkpoints.restore(abstract_like(STATE))
    assert "is missing" in said[0] and "checksums.json is damaged" in said[1]


@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError("cannot read. See full TensorStore details: <bound method pybind11_detail"), "cannot read"),
        (ValueError("first line\nsecond"), "first line"),
        (ValueError("INTERNAL [os_error_code='28' at='here']"), "No space left on device"),
        (PermissionError(13, "Permission denied", "x"), "Permission denied"),
        (KeyError(), "KeyError"),
    ],
)
def test_causes_in_words(error, said):
    assert _cause(error) == said


@pytest.mark.parametrize("number, advice", [(28, "free some space and run"), (13, "when it can be, run")])
def test_space_is_asked_for_where_a_disk_is_full(tmp_path, number, advice):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        with pytest.raises(CheckpointError, match=f"could not be written .*; {advice} the same command again"):
            with checkpoints._writing():
                raise OSError(number, "words")


def test_a_checkpoint_without_checksums_is_read(run_dir):
    (run_dir / "checkpoints" / "8" / NAME).unlink()
    assert restore(run_dir) == (8, [])


def test_a_state_that_is_not_finite_is_neither_saved_nor_gone_on_from(run_dir, monkeypatch):
    poisoned = {**STATE, "params": {"w": STATE["params"]["w"].at[7].set(jnp.nan)}}
    with Checkpoints(run_dir / "checkpoints", kept=9) as checkpoints:
        with pytest.raises(NotFinite, match=r"^params\.w is not finite$"):
            checkpoints.save(9, poisoned, CONFIG, **BESIDE)
        assert checkpoints.steps() == [8, 4]
        monkeypatch.setattr("titans_jax.training.checkpoint.check_finite", lambda state: None)  # as versions before
        checkpoints.save(9, poisoned, CONFIG, **BESIDE)
    monkeypatch.undo()
    assert restore(run_dir) == (
        8, ["the checkpoint of step 9 cannot be read (params.w is not finite); using the one of step 8"]
    )  # fmt: skip


def test_resume_from(run_dir):
    assert restore(run_dir, resume_from=4) == (4, [])
    save_on = tiny_config(resume_from=4)
    with Checkpoints(run_dir / "checkpoints", kept=9) as checkpoints:
        with pytest.raises(ConfigError, match="training.resume_from is 5, but .* are of 4 and 8; use one of them"):
            checkpoints.restore(abstract_like(STATE), resume_from=5)
        checkpoints.set_aside(after=4)
        assert checkpoints.steps() == [4] and (run_dir / "checkpoints_set_aside" / "8").is_dir()
        checkpoints.save(8, STATE, save_on, **BESIDE)
        checkpoints.wait()
        assert checkpoints.steps(resume_from=4) == [8, 4]  # the same command goes on where it was
        shutil.rmtree(run_dir / "checkpoints" / "4")
        assert checkpoints.steps(resume_from=4) == [8]  # also when later checkpoints have taken that one's place
        checkpoints.save(9, STATE, CONFIG, **BESIDE)
        checkpoints.wait()
        checkpoints.set_aside(after=4)
    assert sorted(path.name for path in (run_dir / "checkpoints_set_aside").iterdir()) == ["8", "8_1", "9"]


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            lambda run: run["config"]["model"].update(new_field=3),
            "was written by titans_jax .*, and this version, .*, does not know all of its configuration .there is no "
            "field model.new_field.; use that version, or a later one",
        ),
        (
            lambda run: run.update(format=FORMAT + 1, version="9.9"),
            f"was written by titans_jax 9.9 in format {FORMAT + 1}, and this version, .*, reads formats up to {FORMAT}",
        ),
    ],
)
def test_a_checkpoint_of_a_later_version_is_refused(run_dir, change, sentence):
    """Also where the configuration could not be compared otherwise, and an earlier checkpoint could be read."""
    change_run(run_dir, 8, change)
    for use in (lambda: check_folder(CONFIG, run_dir), lambda: load_run(run_dir)):
        with pytest.raises(CheckpointError, match=sentence):
            use()


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda run: run.update(config={}), "its configuration has no model"),
        (lambda run: run["config"].update(model=3), "its configuration has no model"),
        (lambda run: run.pop("config"), "it holds no configuration"),
        (lambda run: run["config"]["model"].update(dim="x"), "in its configuration, model.dim is 'x'; use a whole"),
    ],
)
def test_a_damaged_configuration_is_a_damaged_checkpoint(run_dir, change, sentence):
    change_run(run_dir, 8, change)
    assert check_folder(CONFIG, run_dir).step == 4
    step, (said,) = restore(run_dir)
    assert step == 4 and sentence in said
    change_run(run_dir, 4, change)
    with pytest.raises(CheckpointError, match="none of the checkpoints in .* can be read"):
        check_folder(CONFIG, run_dir)


@pytest.mark.parametrize(
    "training, error, sentence",
    [
        ({"steps": 7}, ConfigError, "training.steps is 7, but the checkpoint in .* is of step 8; use at least 8, or"),
        ({"steps": 7, "resume_from": 8}, ConfigError, "training.steps is 7, but"),
        ({"resume_from": 5}, ConfigError, "training.resume_from is 5"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused(run_dir, training, error, sentence):
    with pytest.raises(error, match=sentence):
        check_folder(tiny_config(**training), run_dir)
    assert check_folder(tiny_config(steps=7, resume_from=4), run_dir).step == 4


def test_run_folders_that_are_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="training.run_dir is .*/file, which is a file; use a folder"):
        check_folder(CONFIG, tmp_path / "file")
    with pytest.raises(ConfigError, match="training.resume_from is 3, but .* has no checkpoint; leave it out"):
        check_folder(tiny_config(resume_from=3), tmp_path)
    assert check_folder(CONFIG, tmp_path) is None


def test_a_checkpoint_of_format_1_is_read(tmp_path):
    """Written by the last version without formats (commit 38e70a2): one step of a model with a memory."""
    archive = Path(__file__).parent / "checkpoint_of_format_1.tar.xz"
    with lzma.open(archive) as unpacked, tarfile.open(fileobj=unpacked) as tar:
        tar.extractall(tmp_path, filter="data")
    run = load_run(str(tmp_path / "run"), say=pytest.fail)
    assert run.step == 1 and run.config.model.pattern == ("lmm",) and run.config.model.dim == 8
    optimizer = make_optimizer(run.config.optimizer, 1)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"params": run.params, "optimizer": jax.eval_shape(optimizer.init, run.params)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract)
    with Checkpoints(tmp_path / "run" / "checkpoints", say=pytest.fail) as checkpoints:
        state, saved = checkpoints.restore(abstract)
    assert jax.tree.all(jax.tree.map(np.array_equal, state["params"], run.params)) and saved.data == {"next_row": 2}
    saved = check_folder(run.config, tmp_path / "run")
    assert saved.text is None and to_dict(saved.config) == to_dict(run.config)
