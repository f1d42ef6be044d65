"""A trained model as a folder that others read: weights in safetensors, everything else in JSON and Markdown.

    model.safetensors    parameters by name; in its header the format, this library's version and the step
    tensors.csv          every tensor: name, shape, dtype, description and axes
    config.json          the configuration, as `titans configs` prints one, and which defaults its None stands for
    tokenizer.*          the tokenizer's file, unless tokens are bytes
    README.md            the model card: the model, its data, its metrics

`load_export` is the exact inverse, and `load_run` reads such a folder like a run folder. Nothing is pickled.
`export_orbax` makes a run folder without optimizer state instead. Both are written into a temporary folder, which is
renamed when it is complete.
"""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tyro.conf import Positional

import titans_jax
from titans_jax.config import Config, ConfigError, from_saved, leaves, to_saved
from titans_jax.config.validate import check_types
from titans_jax.inference.reading import named_leaves, save_arrays
from titans_jax.plots import save_csv, save_json
from titans_jax.training.checkpoint import CheckpointError, Checkpoints
from titans_jax.training.metrics import read_metrics

if TYPE_CHECKING:
    from titans_jax.training.run import Run

FORMAT = 1
WEIGHTS = "model.safetensors"
HEADER = "titans_jax"

WORDS = {
    "attention": "attention", "channel_bias": "bias of the channel-wise gates", "convolution": "convolution",
    "down": "projection down", "embedding": "embedding", "feed_forward": "feed-forward", "gate": "gate projection",
    "gates": "gates", "head": "output head", "kernel": "matrix", "key": "key", "long_term": "long-term tokens",
    "memory": "memory", "merge": "merge", "norm": "norm", "output": "output projection", "output_gate": "output gate",
    "output_projection": "output projection", "persistent": "persistent tokens", "projection": "projection",
    "query": "query", "recall_norm": "norm of what the memory says", "scale": "scale", "score":
    "scores of kept memories", "skip_value": "value beside the memory", "slow": "slow parameters", "start_weights":
    "learned start of fast matrix", "tokens": "vectors", "up": "projection up", "value": "value", "write_norm":
    "norm of what is written",
}  # fmt: skip
"""Names of modules and parameters in words; others stand as they are."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model as a folder that others read."""

    run: Positional[Path]
    """The folder that training wrote."""
    output: Path = Path("exported")
    """A new folder."""
    format: Literal["safetensors", "orbax"] = "safetensors"
    """safetensors: weights, a table of tensors, config.json, tokenizer, model card. orbax: a run folder without
    optimizer state."""


def main(options: ExportOptions, run: "Run") -> None:
    """The command: write the folder and print where it is."""
    {"safetensors": export_safetensors, "orbax": export_orbax}[options.format](run, options.output)
    print(f"the model of step {run.step:,} is in {options.output}")


def export_safetensors(run: "Run", folder: Path) -> None:
    """Write a run's model into a new folder.

    Raises:
      ConfigError: the folder exists and is not empty.
    """
    with whole_folder(folder) as writing:
        arrays = {name: np.array(leaf, order="C") for name, leaf in named_leaves(run.params).items()}
        about = {"format": FORMAT, "version": titans_jax.__version__, "step": run.step}
        save_arrays(arrays, writing / WEIGHTS, {HEADER: json.dumps(about)})
        save_csv([describe(name, array, run.config) for name, array in arrays.items()], writing / "tensors.csv")
        save_json(to_saved(run.config), writing / "config.json")
        _copy_tokenizer(run, writing)
        (writing / "README.md").write_text(model_card(run), encoding="utf-8")


def export_orbax(run: "Run", folder: Path) -> None:
    """Write a run folder whose one checkpoint has no optimizer state; raises as `export_safetensors`.

    The weights of a run with a moving average are that average, and the configuration then has none.
    """
    config = dataclasses.replace(run.config, optimizer=dataclasses.replace(run.config.optimizer, ema=None))
    with whole_folder(folder) as writing:
        with Checkpoints(writing / "checkpoints", kept=1) as checkpoints:
            checkpoints.save(run.step, {"params": run.params}, config, data_position=None, text=None, goodput=None)
            checkpoints.wait()
        save_json(to_saved(config), writing / "config.json")
        _copy_tokenizer(run, writing)


def load_export(folder: Path) -> tuple[Config, dict[str, jax.Array], int]:
    """The configuration, parameters by name and step that `export_safetensors` wrote.

    Raises:
      CheckpointError: a file is missing, damaged, or written by a later version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="np") as stored:
            about = json.loads((stored.metadata() or {})[HEADER])
            if about["format"] > FORMAT:
                raise CheckpointError(
                    f"{folder} was written by titans_jax {about['version']} in format {about['format']}, and this "
                    f"version reads formats up to {FORMAT}; use that version"
                )
            params = {name: jnp.asarray(stored.get_tensor(name)) for name in stored.keys()}  # noqa: SIM118
        config = from_saved(json.loads((folder / "config.json").read_text()))
        check_types(config)
        return config, params, int(about["step"])
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        cause = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder} cannot be read as an exported model ({cause}); export it again") from error


def into_structure(abstract: Any, params: dict[str, jax.Array], folder: Path) -> Any:
    """Parameters by name, arranged as a model's tree; raises CheckpointError where a name, shape or dtype differs."""
    names = named_leaves(abstract)
    if missing := [name for name in names if name not in params]:
        raise CheckpointError(f"{folder / WEIGHTS} has no {missing[0]}, which config.json asks for; export it again")
    if more := [name for name in params if name not in names]:
        raise CheckpointError(f"{folder / WEIGHTS} has {more[0]}, unknown to config.json; export it again")
    for name, want in names.items():
        if (params[name].shape, params[name].dtype) != (want.shape, want.dtype):
            raise CheckpointError(
                f"{folder / WEIGHTS} has {name} as {params[name].dtype} {list(params[name].shape)}, and config.json "
                f"asks for {want.dtype} {list(want.shape)}; export it again"
            )
    return jax.tree.unflatten(jax.tree.structure(abstract), [params[name] for name in names])


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into: it is renamed to `folder` when all is written, and removed when that fails.

    Raises:
      ConfigError: the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output is {str(folder)!r}, which is there already; give a new folder")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.absolute().parent))
    try:
        yield writing
        writing.chmod(0o755)
        if folder.is_dir():
            folder.rmdir()
        writing.rename(folder)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def describe(name: str, array: np.ndarray, config: Config) -> dict[str, str]:
    """A row of tensors.csv."""
    parts = name.split(".")
    what, axes = [], ""
    if parts[0] == "cycles":
        what.append(f"block {parts[2]} of a cycle ({config.model.pattern[int(parts[2])]})")
        parts, axes = parts[3:], f"cycles {array.shape[0]} x "
    what += [WORDS.get(part, part.replace("_", " ")) for part in parts]
    return {
        "name": name,
        "shape": " x ".join(map(str, array.shape)),
        "dtype": str(array.dtype),
        "what": ", ".join(what),
        "axes": axes + ("in x out" if parts[-1] == "kernel" and array.ndim - bool(axes) == 2 else "as named"),
    }


def model_card(run: "Run") -> str:
    """What a model is, in Markdown: settings, data, metrics, and how to load it."""
    model, count = run.config.model, sum(x.size for x in jax.tree.leaves(run.params))
    lines = [
        f"# {run.folder.name}",
        "",
        f"A language model of {count:,} parameters: {' '.join(model.pattern)} blocks, depth {model.depth}, width "
        f"{model.dim}, {run.tokenizer.vocab_size:,} tokens ({_tokenizer_name(run)}), memory rule "
        f"{model.memory.preset}. "
        f"Trained for {run.step:,} steps with titans_jax {titans_jax.__version__}.",
        "",
        "```python",
        "import titans_jax",
        "",
        'run = titans_jax.load("this folder")',
        'print(run.generate("Once upon a time"))',
        "```",
        "",
        "## Metrics",
        "",
    ]
    validations = [line for line in read_metrics(run.folder) if line["kind"] == "validation"]
    if validations:
        last = {name: value for name, value in validations[-1].items() if name not in ("kind", "step")}
        lines += [f"On held-out text at step {validations[-1]['step']:,}:", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in last.items()]
    else:
        lines.append("None are recorded in the run's folder.")
    data = {name: value for name, value in leaves(run.config.data, "data.").items() if value not in (None, ())}
    settings = {name: value for name, value in leaves(run.config).items() if name.split(".")[0] in SETTINGS}
    for title, fields in (("Data", data), ("Settings", settings)):
        lines += ["", f"## {title}", "", "| field | value |", "|---|---|"]
        lines += [f"| `{name}` | `{value}` |" for name, value in fields.items()]
    return "\n".join(lines) + "\n"


SETTINGS = ("model", "optimizer", "training")


def _tokenizer_name(run: "Run") -> str:
    return "bytes" if run.tokenizer_name == "byte" else Path(run.tokenizer_name).name


def _copy_tokenizer(run: "Run", folder: Path) -> None:
    from titans_jax.training.run import copy_files

    copy_files(run.tokenizer_name, folder)
