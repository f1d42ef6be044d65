"""The configuration of one experiment: what the model is, what it reads, how it is trained.

A configuration is a frozen tree of dataclasses, so it can be hashed, compared, printed as JSON and closed over by a
compiled function. Parts of a model (presets, blocks, sources) are named in it; `titans_jax.config.validate` refuses a
name that nothing is registered under, and any other impossible configuration, in a single sentence before anything is
compiled or written. Nothing here needs jax.
"""

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from titans_jax.config.memory_config import MemoryConfig
from titans_jax.errors import TitansError
from titans_jax.registry import did_you_mean


class ConfigError(TitansError, ValueError):
    """A configuration that cannot work. The message is one sentence: the field, its value, and what would work."""


@dataclass(frozen=True)
class ModelConfig:
    """A model: a pattern of blocks, cycled over the depth, between an embedding and a head."""

    pattern: tuple[str, ...] = ("mac",)
    """Blocks by name, repeated until there are `depth` of them. ("attention",) is Transformer++; ("lmm", "window")
    alternates a memory and a sliding-window attention."""
    head: str = "language_model"
    """Head by name, arguments in brackets; it defines the model's input, output and loss. `language_model` predicts
    next tokens; studies train others, such as `classifier(classes=3)` or `forecaster(horizon=96)`."""
    dim: int = 256
    """Width of the residual stream; equals num_heads * head_dim."""
    depth: int = 4
    """Number of blocks; a multiple of the pattern's length."""
    num_heads: int = 4
    """Heads of the attention and of the memory."""
    head_dim: int = 64
    """Width of one head, and of one memory's keys and values. Even, for the rotary embedding."""
    vocab_size: int = 320
    """Rows of the embedding; at least the tokenizer's vocabulary size. 320 is the byte tokenizer's 257, rounded up to a
    multiple of 64."""
    hidden_dim: int | None = None
    """Width inside SwiGLU; None is 8/3 dim rounded up to a multiple of 64. The levels of a continuum memory together
    have as many parameters as a SwiGLU of this width."""
    segment: int = 512
    """Tokens of one attention segment of MAC; a multiple of the memory's chunk_size."""
    mac_write: Literal["residual", "attention"] = "residual"
    """What MAC writes to its memory. residual: norm(x + attention's output), x being attention's input, so that the
    memory can tell tokens apart. attention: attention's output alone, as the papers print it."""
    mac_long_term: int | None = None
    """Number of long-term tokens that MAC reads from its memory for a segment (N_l of the paper, 256 there), fewer than
    `segment`. Each layer reads them with as many learned queries, and all tokens of the segment see all of them. None:
    one per token of the segment, read with the token's own query, and seen by this token and later ones."""
    merge: Literal["residual", "product"] = "residual"
    """How mac and mag join attention and memory. residual: attention gated by a sigmoid of the memory, plus the memory.
    product: the product of the two alone, normalised and projected, as the papers print it; text is then predicted
    worse."""
    window: int = 2048
    """Tokens that a token sees in sliding-window attention (mag, mal, window, retrofit), itself included."""
    num_persistent: int = 16
    """Learned, input-independent tokens in front of every layer's sequence (Titans eq 19)."""
    conv_size: int = 4
    """Taps of the causal depthwise convolution on queries, keys and values of the memory."""
    attention_conv: bool = False
    """A causal depthwise convolution of `conv_size` taps on queries, keys and values of the attention, too."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding (attention only)."""
    norm_eps: float = 1e-6
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head too."""
    embedding_scale: float = 1.0
    """What a token's row of the embedding is multiplied by where it enters the residual stream. Rows start with a
    deviation of 0.02, small beside what the first blocks add, so that deep models at high learning rates have bursts of
    large gradients; with sqrt(dim), as in the papers' configurations here, these are rare and smaller."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of activations and matmul operands. Parameters and memory state are float32 (float64 with float64
    activations)."""
    remat: Literal["none", "full", "dots", "names", "offload"] = "full"
    """What the backward pass recomputes in each block. none: nothing. full: everything but the reads of memories. dots:
    everything but matmul outputs. names: everything but the queries, keys, values and outputs of attention and memory.
    offload: as names, but these are kept in the host's memory."""
    document_slack: int = 0
    """Extra slots a packed row may use to align documents to the memory's chunks; 0 when the data is aligned."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory of every memory layer."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how rows are cut."""

    source: str = "python"
    """`python`: the running Python's standard library (no download). `text`: a folder of text files. `jsonl`: a .jsonl
    file or folder (.gz, .xz too). `tfds`: a prepared TFDS/ArrayRecord folder. `parquet`: parquet or arrow files.
    `tokens`: a folder that `titans data prepare` wrote. Or the name of a registered source."""
    path: str | None = None
    """File or folder of the source; None only for `python`, and with `mixture`."""
    mixture: tuple[str, ...] = ()
    """Several folders of `tokens` with weights, FOLDER=WEIGHT. A folder's share of every batch's rows is in proportion
    to its weight, rounded, whatever its size; a folder is repeated when it ends."""
    validation_path: str | None = None
    """File or folder of the validation documents of `text`, `jsonl` and `parquet`; None: some documents of `path` are
    held out (`validation_every`)."""
    text_field: str = "text"
    """Name of the text field of `jsonl` and `tfds` records."""
    errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: refuse the file, or read them as U+FFFD."""
    tokenizer: str = "byte"
    """`byte`, or the path of a SentencePiece `.model` or of a Hugging Face tokenizer.json."""
    sequence_length: int = 1024
    """Tokens in one row."""
    batch_size: int = 8
    """Rows in one optimizer step, over all processes and all accumulation microbatches."""
    seed: int = 0
    """Order of the documents."""
    validation_every: int = 50
    """Every n-th document is held out for validation; 0 holds out none, which requires a source with validation
    documents of its own."""
    packing: Literal["documents", "stream"] = "documents"
    """`documents`: several documents in one row, kept apart. `stream`: documents one after another, cut into rows
    anywhere; each row is read as one document."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with a linear warm-up and a decay."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: matrices take orthogonalised steps (optax.contrib.muon), all other parameters those of AdamW."""
    schedule: Literal["cosine", "linear", "constant", "trapezoid"] = "cosine"
    """Learning rate after the warm-up: cosine decay, linear decay, no decay, or (trapezoid) no decay until the last
    fifth of these steps and linear decay then."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 100
    """Steps of linear warm-up to the peak; the first step has 1 / warmup_steps of it."""
    final_learning_rate_ratio: float = 0.1
    """Learning rate at the last step divided by the peak; without effect on the schedule `constant`."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; see `titans_jax.training.optimizer.decays` for what counts as one."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.999. Evaluations, samples and whoever loads the run use the
    average in place of the weights. None keeps no average."""
    train_only: tuple[str, ...] = ()
    """Names, such as `memory share`: only parameters with one of them in their path are trained; all others stay as
    they are and have no moments. () trains everything."""


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: how long, and what is written when. Every `*_every` counts optimizer steps."""

    steps: int = 1000
    """Optimizer steps."""
    seed: int = 0
    """Initial parameters and sampled text."""
    gradient_accumulation: int = 1
    """Microbatches a batch is cut into; changes memory use, not the result beyond rounding."""
    z_loss: float = 0.0
    """Weight of the mean squared log partition function over the predicted targets. It is added to the loss that is
    trained on, but not to the reported losses; 1e-4 keeps logits from drifting (PaLM)."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    evaluate_every: int = 200
    """Steps between two evaluations; the last step always has one."""
    evaluation_batches: int = 8
    """Validation batches read by an evaluation."""
    evaluate_tasks: tuple[str, ...] = ()
    """Tasks of `titans evaluate` (niah, piqa, ..) that every evaluation measures too; their results go to
    evaluations.jsonl."""
    evaluate_samples: int = 16
    """Questions or documents that each of `evaluate_tasks` measures."""
    evaluate_length: int = 4096
    """Tokens of the longest text of `evaluate_tasks`."""
    evaluate_data: str = "data"
    """The folder with the data sets of `evaluate_tasks`."""
    diagnostics_every: int = 200
    """Steps between two reports of the memories' state."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; the last step always has one."""
    checkpoints_kept: int = 2
    """Latest checkpoints kept on disk."""
    checkpoint_commit: Literal["rename", "file"] = "rename"
    """What marks a checkpoint as complete. rename: its folder gets its final name. file: a last file is written into
    it, for disks that cannot rename a folder atomically, such as Cloud Storage FUSE on a bucket without a hierarchical
    namespace."""
    logger: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where scalars go beside metrics.jsonl; `wandb` needs that package; a resumed run continues its wandb run."""
    init_from: str | None = None
    """A run folder, or a folder that `titans export` wrote, whose weights training begins with; shapes and tokenizer
    must be the same. Optimizer, data and all else are this configuration's. `retrofit` blocks take the weights of
    attention or window blocks, and their memories are newly initialised. Once this run has a checkpoint, that is used
    instead."""
    sample_prompt: str = "def "
    """Text that the sample of each evaluation continues."""
    sample_tokens: int = 256
    """Tokens of that sample; 0 writes no sample."""
    run_dir: str | None = None
    """Run folder; None is runs/<name of the config file>."""
    resume_from: int | None = None
    """Resume from the checkpoint of this step, and move later checkpoints out of the way, except those saved by a run
    that was started with this same value: repeating the command continues from the latest of these. None: resume from
    the latest checkpoint."""
    accept_changed_data: bool = False
    """Resume even if the text is not the one that the checkpoint was trained on."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; one axis may be -1, "all that are left"."""

    slice: int = 1
    """TPU slices, each with its own copies of the model; between slices only gradients are sent, over the data center's
    network."""
    data: int = -1
    """Copies of the model; each reads its own rows."""
    fsdp: int = 1
    """Shards of parameters and optimizer state; each reads its own rows."""
    tensor: int = 1
    """Shards of heads and hidden widths; all read the same rows."""
    topology: str | None = None
    """The TPU slice that the batch is sized for and that `titans compile` compiles for, by shape (v5e:2x4) or
    accelerator type (v5litepod-8). Training uses the devices that are there."""


@dataclass(frozen=True)
class ProcessesConfig:
    """The processes that train one model together, one per host. With no field set there is one process, or on a TPU
    slice one per host, which find each other."""

    coordinator: str | None = None
    """host:port of process 0, as the others reach it."""
    count: int | None = None
    """How many processes there are."""
    index: int | None = None
    """The number of this process, from 0."""


@dataclass(frozen=True)
class ProfileConfig:
    """A trace of what the devices do, for xprof or TensorBoard."""

    steps: str | None = None
    """Steps to trace into the run folder's `profile`, FIRST:LAST without LAST: 10:15 traces steps 10 to 14."""

    @property
    def range(self) -> range:
        """The steps to trace."""
        first, last = self.steps.split(":") if self.steps else (0, 0)
        return range(int(first), int(last))


@dataclass(frozen=True)
class Config:
    """One experiment."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    extensions: tuple[str, ...] = ()
    """Python files that register parts of your own (presets, blocks, ..), imported before parts are looked up. A
    configuration file that registers parts adds itself."""


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested dictionaries that json can write."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = Config, prefix: str = "") -> Any:
    """The inverse of `to_dict`; fields that are absent keep their defaults.

    Raises:
      ConfigError: a field is unknown. Types are checked by `validate`.
    """
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown_field(prefix + name)
        if dataclasses.is_dataclass(hints[name]):
            value = from_dict(value, hints[name], f"{prefix}{name}.")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf field by its dotted name: {"model.dim": 256, ...}."""
    found = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        nested = dataclasses.is_dataclass(value)
        found |= leaves(value, f"{prefix}{f.name}.") if nested else {prefix + f.name: value}
    return found


def replaced(config: Any, path: list[str], field: str, value: Any) -> Any:
    """The configuration with another value of a field, `path` being the names of the dataclasses down to it."""
    if not path:
        return dataclasses.replace(config, **{field: value})
    first, *rest = path
    return dataclasses.replace(config, **{first: replaced(getattr(config, first), rest, field, value)})


def unknown_field(name: str, fields: Iterable[str] | None = None) -> ConfigError:
    """The error for a field that is none of `fields` (default: a Config's), with the nearest name among them."""
    return ConfigError(f"there is no field {name}{did_you_mean(name, leaves(Config()) if fields is None else fields)}")
