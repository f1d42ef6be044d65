"""A trained model, brought back from its run folder.

A run folder holds `checkpoints/` (each with the configuration it was trained with), `config.json` (the same, for
people), `tokenizer.model` or `tokenizer.json` unless tokens are bytes, `metrics.jsonl`, `tensorboard/`, `loss.png`,
`memory.png` of a model with memory, `sample.txt`, and, once tasks were measured, `evaluations.jsonl`. While a process
trains there, `lock.json` names it.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from titans_jax import data, sharding
from titans_jax.config import Config, ConfigError, ModelConfig, did_you_mean, import_extensions
from titans_jax.data.tokenizers import BESIDE
from titans_jax.inference.reading import named_leaves
from titans_jax.layers.feed_forward import HIDDEN_MULTIPLE
from titans_jax.models import LanguageModel, make_model
from titans_jax.models.pattern import blocks_of
from titans_jax.models.stack import LANGUAGE_MODEL
from titans_jax.training import export
from titans_jax.training.checkpoint import CheckpointError, Checkpoints
from titans_jax.training.resume import TOKENIZERS, differing, own_tokenizer


@dataclass(frozen=True)
class Run:
    """A model with everything needed to use it."""

    config: Config
    tokenizer: data.Tokenizer
    graphdef: nnx.GraphDef
    params: dict[str, Any]
    step: int
    folder: Path
    """The folder that the model came from, where measurements of it may be kept too."""
    tokenizer_name: str = "byte"
    """"byte", or the path of the tokenizer's file."""

    @property
    def model(self) -> LanguageModel:
        """The model itself."""
        return nnx.merge(self.graphdef, self.params)

    def generate(self, prompt: str = "", max_tokens: int = 256, seed: int = 0, **sampling: Any) -> str:
        """The continuation of a prompt; `sampling` are fields of `inference.Sampling`, such as temperature=0."""
        from titans_jax.inference import Generator, Sampling

        generator = Generator(self.graphdef, self.tokenizer, Sampling(**sampling))
        return "".join(generator.stream(self.params, prompt, max_tokens, seed))


def load_run(run_dir: str | Path, say: Callable[[str], None] = print) -> Run:
    """The model of the latest readable checkpoint of a run folder; `say` is called about checkpoints that are not.

    A folder that `titans export` wrote can be given too. The extensions of the run's configuration are imported first,
    so that the parts they register are found.

    Raises:
      CheckpointError: the folder holds no checkpoint, or none that can be read.
      ConfigError: it is no run folder; an extension is not there any more, or fails.
    """
    run_dir = Path(run_dir)
    if (run_dir / export.WEIGHTS).is_file():
        config, named, step = export.load_export(run_dir)
        import_extensions(config.extensions)
        graphdef, abstract = abstract_model(config.model)
        return _make_run(config, graphdef, export.into_structure(abstract, named, run_dir), step, run_dir)
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        problem = "has no checkpoints" if run_dir.is_dir() else "does not exist"
        raise ConfigError(
            f"{run_dir} is not a run folder: it {problem}; give one that training made, or that titans export wrote"
        )
    with Checkpoints(folder, say=say) as checkpoints:
        saved = checkpoints.latest()
        if saved is None:
            raise CheckpointError(f"{folder} holds no checkpoint; train the run again")
        config = saved.config
        import_extensions(config.extensions)
        graphdef, params = abstract_model(config.model)
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if jax.process_count() > 1:  # every device gets the whole model, in all processes
            place = NamedSharding(sharding.make_mesh(), PartitionSpec())
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params)
        weights = "params" if config.optimizer.ema is None else "ema"
        state, saved = checkpoints.restore({weights: params})
    return _make_run(config, graphdef, state[weights], saved.step, run_dir)


def _make_run(config: Config, graphdef: nnx.GraphDef, params: Any, step: int, run_dir: Path) -> Run:
    own = None if config.data.tokenizer == "byte" else own_tokenizer(run_dir)
    name = str(own or config.data.tokenizer)
    return Run(config, data.load_tokenizer(name), graphdef, params, step, run_dir, name)


def with_absolute_paths(config: Config) -> Config:
    """The configuration with absolute paths, as a checkpoint keeps it: a run may be used from another folder."""
    values = {name: getattr(config.data, name) for name in ("path", "validation_path", "tokenizer")}
    paths = {
        name: os.path.abspath(os.path.expanduser(value))
        for name, value in values.items()
        if value is not None and "://" not in value and (name, value) != ("tokenizer", "byte")
    }
    start = config.training.init_from
    if start is not None:
        training = dataclasses.replace(config.training, init_from=os.path.abspath(os.path.expanduser(start)))
        config = dataclasses.replace(config, training=training)
    mixture = tuple(
        each if "://" in each else os.path.abspath(os.path.expanduser(each)) for each in config.data.mixture
    )
    extensions = tuple(map(os.path.abspath, config.extensions))
    read = dataclasses.replace(config.data, mixture=mixture, **paths)
    return dataclasses.replace(config, data=read, extensions=extensions)


def copy_tokenizer(config: Config, run_dir: Path, begins: bool) -> None:
    """Copy the tokenizer's files to the run folder, so that a folder that is moved has all that its model needs.

    Where the run begins, files that are there are of one that ended before its first checkpoint, and are replaced,
    unless they are the ones that the configuration names.
    """
    if jax.process_index() != 0:
        return
    if begins:
        named = [file.resolve() for file in data.tokenizer_files(config.data.tokenizer)]
        for old in (run_dir / name for name in (*TOKENIZERS, *BESIDE)):
            if old.resolve() not in named:
                old.unlink(missing_ok=True)
    if own_tokenizer(run_dir) is None:
        copy_files(config.data.tokenizer, run_dir)


def copy_files(tokenizer: str, folder: Path) -> None:
    """Copy a tokenizer's files to a folder, the one that `own_tokenizer` looks for last, when all others are there."""
    for file in reversed(data.tokenizer_files(tokenizer)):
        first = file == data.tokenizer_files(tokenizer)[0]
        own = (
            folder / ("tokenizer.json" if file.suffix == ".json" else "tokenizer.model")
            if first
            else folder / file.name
        )
        copying = own.with_suffix(".tmp")
        shutil.copyfile(file, copying)
        copying.replace(own)


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Structure of a model, and the shapes and dtypes of its parameters; computes nothing."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(params)


def init_model(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Structure of a model, and its initial parameters as nested dictionaries."""
    return abstract_model(config)[0], make_init(config)(jax.random.key(seed))


def make_init(config: ModelConfig) -> Callable[[jax.Array], dict[str, Any]]:
    """The compiled function from a random key, jax.random.key(seed), to a model's initial parameters."""
    # Compiled as one program: faster than hundreds of small ones, and sharded parameters are never whole anywhere.
    return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(make_model(config, rngs=nnx.Rngs(key)))))


class InitialWeights(NamedTuple):
    """The parameters that a run begins with, and lines that say which run they are from and which fields differ."""

    params: dict[str, Any]
    said: list[str]


def initial_weights(config: Config) -> InitialWeights:
    """The parameters of the run that `training.init_from` names, as the tree of this configuration's model.

    Raises:
      ConfigError: it is no run folder, or the tokenizer or the shape of a parameter differs.
      CheckpointError: as `load_run`.
    """
    source = Path(config.training.init_from).expanduser()
    try:
        run = load_run(source)
    except ConfigError as error:
        raise ConfigError(f"training.init_from: {error}") from error
    own, theirs = ([file.read_bytes() for file in data.tokenizer_files(name)[:1]] for name in
                   (config.data.tokenizer, run.tokenizer_name))  # fmt: skip
    if own != theirs:
        raise ConfigError(
            f"data.tokenizer is {config.data.tokenizer}, but training.init_from {str(source)!r} was trained with "
            f"another one; use {run.tokenizer_name}"
        )
    have, want = named_leaves(run.params), named_leaves(abstract_model(config.model)[1])
    anew = [name for name in want if name not in have and name.startswith(_may_begin_anew(config.model))]
    for name in [*want, *have]:
        then, now = (tree[name].shape if name in tree else None for tree in (have, want))
        if then != now and name not in anew:
            raise ConfigError(
                f"training.init_from is {str(source)!r}, whose {name} is {_size(then)}, and this model's is "
                f"{_size(now)}; use the model.* fields of that run's config.json"
            )
    drawn = named_leaves(init_model(config.model, config.training.seed)[1]) if anew else {}
    leaves = [drawn[name] if name in anew else have[name].astype(leaf.dtype) for name, leaf in want.items()]
    params = jax.tree.unflatten(jax.tree.structure(abstract_model(config.model)[1]), leaves)
    said = [f"beginning with the weights of {source}, step {run.step}"]
    if anew:
        said.append(f"not there, and drawn: {sum(want[name].size for name in anew):,} parameters of {_parts(anew)}")
    return InitialWeights(params, said + [f"not as there: {each}" for each in differing(run.config, config)])


def first_model(config: Config, initial: InitialWeights | None) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Structure of a run's model, and the parameters that it begins with: those drawn by `init_model`, or `initial`,
    spread over the devices as the drawn ones would be."""
    graphdef, params = init_model(config.model, config.training.seed)
    if initial is not None:
        params = jax.tree.map(lambda new, drawn: jax.device_put(new, drawn.sharding), initial.params, params)
    return graphdef, params


def _may_begin_anew(model: ModelConfig) -> tuple[str, ...]:
    """Prefixes of the names of parameters that the run of `training.init_from` may lack (`Block.added`)."""
    every = enumerate(blocks_of(model))
    return tuple(f"cycles.blocks.{number}.{part}" for number, block in every for part in block.added)


def _parts(names: list[str]) -> str:
    """The modules of blocks that parameters belong to: "cycles.blocks.0.memory, cycles.blocks.0.share"."""
    return ", ".join(dict.fromkeys(".".join(name.split(".")[:4]) for name in names))


def _size(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " x ".join(map(str, shape))


def check_vocabulary(config: Config, tokenizer: data.Tokenizer) -> None:
    """Refuse a model that does not predict tokens, or whose vocabulary is smaller than its tokenizer's.

    Raises:
      ConfigError: names the head, or both sizes.
    """
    if config.model.head != LANGUAGE_MODEL:
        raise ConfigError(f"model.head is {config.model.head!r}; use {LANGUAGE_MODEL} for text: others are for studies")
    if config.model.vocab_size < tokenizer.vocab_size:
        works = -(-tokenizer.vocab_size // 64) * 64
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokenizer {config.data.tokenizer} has "
            f"{tokenizer.vocab_size} tokens; use model.vocab_size {works}"
        )


def check_train_only(config: Config) -> None:
    """Refuse a name to train that is in no parameter's path.

    Raises:
      ConfigError: with the names there are.
    """
    if not config.optimizer.train_only:
        return
    paths = [name.split(".") for name in named_leaves(abstract_model(config.model)[1])]
    known = dict.fromkeys(part for path in paths for part in path if not part.isdigit())
    for name in config.optimizer.train_only:
        if name not in known:
            raise ConfigError(
                f"optimizer.train_only has {name!r}, which is in no parameter's path; use some of {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )


def with_parameters(config: ModelConfig, count: int, multiple: int = HIDDEN_MULTIPLE) -> ModelConfig:
    """The model with its feed-forward width, a multiple of `multiple`, chosen so that it has nearly `count` parameters;
    a model without a feed-forward is returned unchanged."""
    narrow, wide = (count_params(dataclasses.replace(config, hidden_dim=width)) for width in (multiple, 2 * multiple))
    if wide == narrow:
        return config
    return dataclasses.replace(config, hidden_dim=multiple * max(1, 1 + round((count - narrow) / (wide - narrow))))


def count_params(config: ModelConfig) -> int:
    """Trained parameters of a model; computes nothing."""
    return sum(x.size for x in jax.tree.leaves(abstract_model(config)[1]))
