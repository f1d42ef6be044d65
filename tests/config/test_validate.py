"""Configurations: what is refused, in which words, and the way to JSON and back."""

import dataclasses
import json

import jax
import pytest

from titans_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    from_dict,
    from_saved,
    leaves,
    memory_rule,
    to_dict,
    to_saved,
)
from titans_jax.config.validate import validate
from titans_jax.models import check_model


def test_defaults_are_valid_and_hashable():
    validate(Config())
    assert hash(Config()) == hash(Config())


def test_json_round_trip():
    config = Config(model=ModelConfig(pattern=("mac", "window"), memory=MemoryConfig(momentum=False)))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict({"model": {"dim": 512}}).model == ModelConfig(dim=512)


def test_a_configuration_saved_before_a_field_existed_means_what_models_did_then():
    config = Config(model=ModelConfig(dim=512, memory=MemoryConfig(preset="yaad")))
    saved = to_dict(config)
    assert from_saved(json.loads(json.dumps(saved))) == config
    del saved["model"]["mac_write"], saved["model"]["merge"]
    for field in ("forget_to", "step_unit"):
        del saved["model"]["memory"][field]
    memory = MemoryConfig(preset="yaad", forget_to="zero", step_unit="head_dim")
    assert from_saved(saved).model == ModelConfig(dim=512, mac_write="attention", merge="product", memory=memory)
    assert from_saved({}).model.memory.step_unit == "head_dim"
    # What later fields leave as it was.
    before = from_saved({}).model
    assert before.mac_long_term is before.memory.start is before.memory.channel_steps is None
    assert (before.memory.gate_maps, before.memory.gate_rank, before.memory.shared_gates) == ("shared", 32, False)


def test_a_memora_that_was_saved_when_it_had_no_skip_has_none():
    saved = to_dict(Config(model=ModelConfig(memory=MemoryConfig(preset="memora"))))
    assert from_saved(saved).model.memory.value_skip is None
    del saved["model"]["attention_conv"]
    start = "kullback_leibler(start_deviation=1.0)"
    before = MemoryConfig(preset="memora", value_skip=False, normalize_values=False, retention=start)
    assert from_saved(saved).model.memory == before
    memora = {"preset": "memora"}
    for fields in (
        {"preset": "yaad"},
        {"preset": "somebody's own"},
        memora | {"value_skip": True, "normalize_values": False, "retention": "decay"},
        memora | {"normalize_values": True, "retention": "f_divergence"},
    ):
        memory = MemoryConfig(**fields)
        saved["model"]["memory"] = to_dict(Config(model=ModelConfig(memory=memory)))["model"]["memory"]
        assert from_saved(saved).model.memory == memory


@pytest.mark.parametrize("preset, values", [("memora", False), ("yaad", None), ("somebody's own", None)])
def test_a_saved_none_keeps_what_it_stood_for(preset, values):
    """Until values of weights made of logits were scaled to the size of reads, a None stood for as projected."""
    config = Config(model=ModelConfig(memory=MemoryConfig(preset=preset)))
    assert from_saved(json.loads(json.dumps(to_saved(config)))) == config
    retention = "kullback_leibler(start_deviation=1.0)" if preset == "memora" else None
    wanted = MemoryConfig(preset=preset, normalize_values=values, retention=retention)
    assert from_saved(to_dict(config)).model.memory == wanted
    with pytest.raises(ConfigError, match="^defaults is 99, and this version knows 1 to 6; use a later version$"):
        from_saved(to_saved(config) | {"defaults": 99})


@pytest.mark.parametrize(
    "said, meant",
    [
        ("kullback_leibler", "kullback_leibler(start_deviation=1.0)"),
        ("kullback_leibler(size=2.0)", "kullback_leibler(size=2.0, start_deviation=1.0)"),
        ("lagged_kullback_leibler()", "lagged_kullback_leibler(start_deviation=1.0)"),
        ("chi_squared", "chi_squared"),
    ],
)
def test_saved_logits_start_where_they_did(said, meant):
    """With a deviation of 1 until 2026-11-27."""
    config = Config(model=ModelConfig(memory=MemoryConfig(preset="memora", retention=said)))
    assert from_saved(to_saved(config) | {"defaults": 2}).model.memory == MemoryConfig(preset="memora", retention=meant)


def test_every_field_is_documented():
    """The string under a field is what `--help` shows, so none may be missing."""
    import inspect

    for kind in (MemoryConfig, ModelConfig, DataConfig, OptimizerConfig, TrainingConfig, MeshConfig):
        source = inspect.getsource(kind)
        for field in dataclasses.fields(kind):
            after = source.split(f"\n    {field.name}: ", 1)[1].split("\n", 1)[1]
            assert after.lstrip().startswith('"""'), f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize(
    "section, change, message",
    [
        ("model", {"dim": 300}, "model.head_dim 64 x model.num_heads 4 is 256, not model.dim 300; use model.head_"),
        ("model", {"num_heads": 3}, "model.num_heads 3 is 192, not model.dim 256; use model.dim 192"),
        ("model", {"segment": 500}, "model.segment is 500; use a multiple of model.memory.chunk_size 16, such as 496"),
        ("model", {"segment": 8}, "model.segment is 8; use a multiple of model.memory.chunk_size 16, such as 16"),
        ("model", {"segment": 32, "mac_long_term": 32}, "model.mac_long_term is 32; use 1 to 31, fewer than model.seg"),
        ("model", {"mac_long_term": 0}, "model.mac_long_term is 0; use 1 to 511, fewer than model.segment"),
        ("model", {"pattern": ("mak",)}, "model.pattern is ('mak',); use one or more of lmm, mac, mag, "),
        ("model", {"pattern": ("mak",)}, "; did you mean ma"),
        ("model", {"pattern": "mac"}, "model.pattern is 'mac'; use one or more texts"),
        (
            "model",
            {"memory": MemoryConfig(local_chunks=8)},
            "model.memory.local_chunks is 8; use one or more whole numbers",
        ),
        ("model", {"pattern": ()}, "model.pattern is empty; name at least one block"),
        ("model", {"pattern": ("mac", "mag", "mal")}, "model.depth is 4; use a multiple of 3, the length of "),
        ("model", {"dim": 252, "num_heads": 4, "head_dim": 63}, "model.head_dim is 63; use an even number"),
        ("model", {"dtype": "float16"}, "model.dtype is 'float16'; use bfloat16, float32 or float64"),
        ("model", {"dim": "256"}, "model.dim is '256'; use a whole number"),
        ("model", {"dim": 256.0}, "model.dim is 256.0; use a whole number"),
        ("model", {"tie_embeddings": 1}, "model.tie_embeddings is 1; use True or False"),
        ("model", {"hidden_dim": "x"}, "model.hidden_dim is 'x'; use a whole number or None"),
        ("model", {"hidden_dim": 0}, "model.hidden_dim is 0; use at least 1, or None"),
        ("model", {"memory": MemoryConfig(preset="monetta")}, "model.memory.preset is 'monetta'; use retnet"),
        ("model", {"memory": MemoryConfig(architecture="x")}, "model.memory.architecture is 'x'; use linear, mlp, "),
        (
            "model",
            {"memory": MemoryConfig(preset="yaad", architecture="polynomial_mlp")},
            "model.memory.channel_retention gives each of model.head_dim 64 key channels a gate, and this memory has ",
        ),
        (
            "model",
            {"memory": MemoryConfig(architecture="polynomial_mlp", channel_steps="key")},
            "model.memory.channel_steps gives each of model.head_dim 64 key channels a gate, and this memory has ",
        ),
        (
            "model",
            {"memory": MemoryConfig(preset="mesa", channel_retention="value")},
            "model.memory.channel_retention gives each of model.head_dim 64 value channels a gate, and this memory has",
        ),
        (
            "model",
            {"memory": MemoryConfig(preset="lightning_attention", tie_keys=False, prediction_gate=True)},
            "model.memory.prediction_gate is True, and without tied keys reads predict nothing; use False",
        ),
        ("model", {"memory": MemoryConfig(depth=5)}, "model.memory.depth is 5; use 1 to 4"),
        ("model", {"memory": MemoryConfig(max_step_size=float("nan"))}, "max_step_size is nan; use a positive number"),
        ("model", {"memory": MemoryConfig(gate_rank=0)}, "model.memory.gate_rank is 0; use at least 1, or None"),
        ("model", {"memory": None}, "model.memory is None; use a MemoryConfig"),
        ("data", {"packing": "tight"}, "data.packing is 'tight'; use documents or stream"),
        ("data", {"sequence_length": 0}, "data.sequence_length is 0; use at least 1"),
        (
            "data",
            {"validation_every": 1},
            "data.validation_every is 1; use at least 2, so that something is left to train on, or 0",
        ),
        ("optimizer", {"learning_rate": 0.0}, "optimizer.learning_rate is 0.0; use a positive number"),
        ("optimizer", {"beta2": 1.0}, "optimizer.beta2 is 1.0; use a number in [0, 1)"),
        ("training", {"gradient_accumulation": 3}, "data.batch_size is 8; use a multiple of training."),
        ("optimizer", {"weight_decay": float("inf")}, "optimizer.weight_decay is inf; use at least 0"),
        ("data", {"seed": -1}, "data.seed is -1; use 0 to 4294967295"),
        ("training", {"seed": 1 << 64}, "training.seed is 18446744073709551616; use 0 to 4294967295"),
        ("training", {"steps": 0}, "training.steps is 0; use at least 1"),
        ("training", {"sample_tokens": 10**12}, "training.sample_tokens is 1000000000000; use at most 1073741824"),
        ("training", {"evaluation_batches": 10**30}, "training.evaluation_batches is 1000000000000000000000000"),
        ("optimizer", {"warmup_steps": 10**12}, "optimizer.warmup_steps is 1000000000000; use at most 1073741824"),
        ("model", {"hidden_dim": 1 << 40}, "model.hidden_dim is 1099511627776; use at most 1073741824"),
        ("optimizer", {"learning_rate": 1e300}, "optimizer.learning_rate is 1e+300; use a number from -3e+38 to 3e+38"),
        ("optimizer", {"learning_rate": 10**400}, "; use a number from -3e+38 to 3e+38"),
        ("model", {"memory": MemoryConfig(preset="moneta", p=float("inf"))}, "model.memory.p is inf; use a number "),
        ("model", {"memory": MemoryConfig(q=float("nan"))}, "model.memory.q is nan; use a number from -3e+38 to 3e+38"),
        ("training", {"z_loss": -1e-4}, "training.z_loss is -0.0001; use at least 0"),
        ("mesh", {"fsdp": 0}, "mesh.fsdp is 0; use at least 1, or -1 for the rest"),
        ("mesh", {"fsdp": -1}, "mesh has several axes set to -1"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(section, change, message):
    config = dataclasses.replace(Config(), **{section: dataclasses.replace(getattr(Config(), section), **change)})
    with pytest.raises(ConfigError) as error:
        validate(config)
        check_model(config.model)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_intervals_may_be_longer_than_any_run():
    """A number of steps that is never reached switches what happens every so many steps off."""
    validate(Config(training=TrainingConfig(diagnostics_every=10**12, checkpoints_kept=10**12)))


def test_only_token_predictions_have_a_z_loss():
    model = dataclasses.replace(Config().model, head="forecaster(horizon=96)")
    config = Config(model=model, training=dataclasses.replace(Config().training, z_loss=1e-4))
    with pytest.raises(ConfigError, match="z_loss is 0.0001; use 0, as model.head forecaster.* predicts no tokens"):
        validate(config)


def test_float64_needs_jax_to_have_it():
    config = Config(model=dataclasses.replace(Config().model, dtype="float64"))
    with pytest.raises(ConfigError, match="model.dtype is float64; set JAX_ENABLE_X64=1"):
        validate(config)
    with jax.enable_x64(True):
        validate(config)


@pytest.mark.parametrize(
    "memory, sentence",
    [
        (
            MemoryConfig(preset="omeganet", omega_window=64, chunk_size=64),
            "model.memory.omega_window is 64; use at most data.sequence_length 32",
        ),
        (
            MemoryConfig(preset="lact", chunk_size=64),
            "model.memory.chunk_size is 64; use at most data.sequence_length 32, as lact makes its steps at",
        ),
    ],
)
def test_memories_that_rows_are_too_short_for_are_refused(memory, sentence):
    config = Config(model=ModelConfig(memory=memory), data=DataConfig(sequence_length=32))
    with pytest.raises(ConfigError, match=sentence):
        validate(config)
    validate(dataclasses.replace(config, data=DataConfig(sequence_length=64)))
    shorter = dataclasses.replace(memory, chunk_size=32, omega_window=None)
    validate(dataclasses.replace(config, model=ModelConfig(memory=shorter)))


def test_unknown_field_of_a_file_names_the_nearest():
    with pytest.raises(ConfigError, match="there is no field model.dimm; did you mean model.dim?"):
        from_dict({"model": {"dimm": 3}})
    with pytest.raises(ConfigError, match="there is no field qqqq$"):
        from_dict({"qqqq": 3})


def test_leaves_are_all_fields_by_dotted_name():
    names = leaves(Config())
    assert names["model.memory.chunk_size"] == 16 and names["mesh.data"] == -1
    assert "model.memory" not in names


@pytest.mark.parametrize(
    "preset, said, meant", [("moneta", None, "lp"), ("moneta", "l2", "l2"), ("yaad", None, None), ("yaad", "lp", "lp")]
)
def test_a_saved_moneta_keeps_its_bias(preset, said, meant):
    """Until 2026-11-28 its cotangent grew with every error; today's default goes on as a straight line beyond 1."""
    memory = MemoryConfig(preset=preset, bias=said)
    config = Config(model=ModelConfig(memory=memory))
    assert from_saved(to_saved(config)).model.memory == memory
    saved = from_saved(to_saved(config) | {"defaults": 4}).model.memory
    assert saved == MemoryConfig(preset=preset, bias=meant)
    assert (memory_rule(saved).bias == memory_rule(memory).bias) == ((preset, said) != ("moneta", None))
    letter = Config(model=ModelConfig(memory=MemoryConfig(preset=preset, bias=said, bound_slope=False)))
    assert from_saved(to_saved(letter) | {"defaults": 4}) == letter  # there the two are one
