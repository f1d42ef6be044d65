"""The identity of a run's text: a checkpoint stores it, so that a run that goes on notices when the text is another.

The text itself is compared, not names or dates of files: a folder may be moved, compressed or copied.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from titans_jax.data.errors import DataError
from titans_jax.data.pipeline import Statistics
from titans_jax.data.sources import describe_source

if TYPE_CHECKING:
    from titans_jax.config import DataConfig


def identify(config: DataConfig, train: Statistics, validation: Statistics) -> dict[str, Any]:
    """The identity to store: documents, bytes and fingerprint of both splits, and Python's version for its library."""
    splits = {"train": train, "validation": validation}
    found: dict[str, Any] = {
        name: {"documents": split.num_documents, "bytes": split.num_bytes, "fingerprint": split.fingerprint}
        for name, split in splits.items()
    }
    return found | ({"python": platform.python_version()} if config.source == "python" else {})


def check_same_text(config: DataConfig, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse text that is not the one a checkpoint was trained on.

    Args:
      saved, now: the identities (`identify`) of the checkpoint's text and of the present text.

    Raises:
      DataError: names the split that differs, with the counts of both texts.
    """
    for name in ("train", "validation"):
        if saved[name]["fingerprint"] == now[name]["fingerprint"]:
            continue
        then, here = (f"{each[name]['documents']:,} documents, {each[name]['bytes']:,} bytes" for each in (saved, now))
        if config.source == "python":
            then, here = (f"Python {each.get('python')}'s, {text}" for each, text in ((saved, then), (now, here)))
        raise DataError(
            f"the {name} text of {describe_source(config)} is not the one that the checkpoint was trained on (then "
            f"{then}; now {here}): bring that text back, or set training.accept_changed_data to go on with this one"
        )
