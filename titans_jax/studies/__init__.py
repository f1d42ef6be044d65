"""Studies: tables of small models, trained here, one command each; see `titans_jax.studies.study`."""

from titans_jax.studies import (  # noqa: F401  (they register their studies)
    ablation,
    babilong,
    distance,
    dna,
    forecasting,
    language,
    length,
    mad,
    mqar,
    retrofit,
    state_tracking,
    step_size,
    variants,
)
from titans_jax.studies.generated import Generated, Recall
from titans_jax.studies.study import STUDIES, Cell, Column, Study, StudyOptions, register_study, with_seeds
from titans_jax.studies.tasks import Language, Task

__all__ = [
    "STUDIES",
    "Cell",
    "Column",
    "Generated",
    "Language",
    "Recall",
    "Study",
    "StudyOptions",
    "Task",
    "register_study",
    "with_seeds",
]
