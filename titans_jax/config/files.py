"""Configurations in Python files: those that come with the package, and a user's own.

A file defines `config`, a Config or a function that returns one, which has the file's name; or `configs`, a dictionary
from names to several of them:

    titans train mac_340m              # in a file that comes with the package
    titans train my_model.py           # config = Config(...)
    titans train my_models.py:small    # configs = {"small": Config(...), ...}
"""

import dataclasses
from pathlib import Path

import titans_jax
from titans_jax.config import Config, ConfigError, import_file
from titans_jax.registry import did_you_mean, registrations

_extensions: set[str] = set()
"""Modules of configuration files that have registered parts."""


def find_config(asked: str) -> tuple[str, Config]:
    """The name and the configuration that FILE, FILE:NAME or the NAME of a shipped configuration stands for.

    Only a path that ends in .py is taken for a file, so that no other file or folder hides a shipped configuration.

    Raises:
      ConfigError: there is no such configuration, or its file fails; one sentence.
    """
    path, _, name = asked.rpartition(":") if ".py:" in asked else (asked, "", "")
    if path.endswith(".py"):
        if not Path(path).is_file():
            shipped = f"; {Path(path).stem} comes with the package: leave out the rest" * (
                Path(path).stem in shipped_configs()
            )
            raise ConfigError(f"there is no file {path}{shipped or '; give the path of a Python file that is there'}")
        return _choose(load_configs(Path(path)), name, path)
    if Path(path).name != path:
        raise ConfigError(f"{path} is not the name of a configuration, nor a Python file, whose name ends in .py")
    shipped = shipped_configs()
    if path not in shipped:
        works = did_you_mean(path, shipped) or "; use a Python file, or one of those that `titans configs` lists"
        raise ConfigError(f"there is no configuration {path}{works}")
    return path, shipped[path]


def _choose(configs: dict[str, Config], name: str, file: str) -> tuple[str, Config]:
    if not name and len(configs) == 1:
        (name,) = configs
    if name not in configs:
        said = f"no configuration {name}" if name else "several configurations"
        raise ConfigError(f"{file} has {said}; use {' or '.join(f'{file}:{each}' for each in configs)}")
    return name, configs[name]


def shipped_configs() -> dict[str, Config]:
    """The configurations that come with the package, by name, in the order of their files."""
    return {name: config for file in sorted(folder().glob("*.py")) for name, config in load_configs(file).items()}


def folder() -> Path:
    """Where the configurations that come with the package are: inside it in a wheel, beside it in a checkout."""
    package = Path(titans_jax.__file__).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def load_configs(file: Path) -> dict[str, Config]:
    """Run a Python file and return its configurations by name: those in `configs`, or `config` by the file's name.

    A file that registers parts of a model (see titans_jax.registry) becomes an extension of its configurations, so that
    a run of them finds the parts later.

    Raises:
      ConfigError: the file fails, or defines no configuration.
    """
    before = registrations()
    module = import_file(file)
    try:
        found = getattr(module, "configs", None) or {file.stem: getattr(module, "config", None)}
        configs = {name: config() if callable(config) else config for name, config in dict(found).items()}
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{file} fails with {type(error).__name__}: {error}") from error
    if not all(isinstance(config, Config) for config in configs.values()):
        raise ConfigError(f"{file} defines no configuration; write config = titans_jax.config.Config(...) in it")
    if registrations() > before:
        _extensions.add(module.__name__)
    if module.__name__ in _extensions:  # a file that is imported already registers nothing when it is asked for again
        configs = {name: _extended(config, file) for name, config in configs.items()}
    return configs


def _extended(config: Config, file: Path) -> Config:
    """The configuration with this file among its extensions."""
    extensions = tuple(dict.fromkeys((*config.extensions, str(file.resolve()))))
    return dataclasses.replace(config, extensions=extensions)
