"""The one exception of the data package."""

from titans_jax.errors import TitansError


class DataError(TitansError, ValueError):
    """Data or data fields that cannot be used: one sentence with the field, its value and what would work."""
