"""What can go wrong before a request is served. Every message says what was given and what to do."""

from collections.abc import Sequence


class PliantError(Exception):
    """Base of all errors that a person is shown in one line, without a traceback."""


class ModelError(PliantError):
    """A model that cannot be found, fetched, or served."""


class DataError(PliantError):
    """Labelled texts that cannot be read, or from which nothing follows."""


class ConfigError(PliantError):
    """A cluster.yaml that cannot be served; `problems` holds one line for each thing to change."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class CannotCompileError(PliantError):
    """The reason why a model runs uncompiled, for the operator."""
