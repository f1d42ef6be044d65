"""Studies: tables of small models, trained here, one command each; see `titans_jax.studies.study`."""

from titans_jax.studies import ablation, length, recall, step_size  # noqa: F401  (they register their studies)
from titans_jax.studies.study import STUDIES, Cell, Column, Study, StudyOptions, register_study, with_seeds
from titans_jax.studies.tasks import Language, Recall, Task

__all__ = [
    "STUDIES",
    "Cell",
    "Column",
    "Language",
    "Recall",
    "Study",
    "StudyOptions",
    "Task",
    "register_study",
    "with_seeds",
]
