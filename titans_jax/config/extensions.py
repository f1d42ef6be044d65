"""Extensions: Python files that register a user's own parts (`titans_jax.registry`).

`Config.extensions` names them, so that a run can be read from its folder alone: `titans generate` and `titans evaluate`
import them before they look up what the configuration names.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from titans_jax.config.schema import ConfigError


def import_extensions(paths: Iterable[str]) -> None:
    """Import Python files, each once as long as it does not change.

    Raises:
      ConfigError: a file is not there, or fails.
    """
    for path in paths:
        import_file(Path(path))


def import_file(path: Path) -> ModuleType:
    """A Python file as a module; one that is imported already, and has not changed, is not run a second time.

    Raises:
      ConfigError: the file is not there, or fails.
    """
    if not path.is_file():
        raise ConfigError(
            f"extensions names {path}, which is no file; give the file that registers the run's own parts"
        )
    path = path.resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path} fails with {type(error).__name__}: {error}") from error
    return module
