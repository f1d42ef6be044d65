"""The one exception of the data package."""


class DataError(ValueError):
    """Data or data fields that cannot be used: one sentence with the field, its value and what would work."""
