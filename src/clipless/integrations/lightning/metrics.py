"""What is logged while training is withheld: it is computed from records, without noise."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection


class Withheld(_ResultCollection):
    """The results of the training loop. `self.log` ends here, before loggers, progress bars, schedulers and other callbacks
    see a value, so none of them can act on one."""

    def __init__(self, log_not_private: bool) -> None:
        super().__init__(training=True)
        self._log_not_private, self._public, self._silent = log_not_private, False, False
        self._told: set[str] = set()

    @contextmanager
    def public(self) -> Iterator[None]:
        """Inside, what is logged is public."""
        self._public = True
        try:
            yield
        finally:
            self._public = False

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, nothing is logged: a check repeats what was done."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value if it is public or was asked for, else warn, once for each name."""
        if self._silent:
            return
        if not self._public and name not in self._told:
            self._told.add(name)
            warnings.warn(self._message(fx, name), stacklevel=3)
        if self._public or self._log_not_private:
            super().log(fx, name, value, *args, **kwargs)

    def _message(self, fx: str, name: str) -> str:
        if self._log_not_private:
            return (
                f"{name!r}, logged in {fx}, is not private: keep it, and what is chosen by it, as secret as the data."
            )
        return (
            f"{name!r}, logged in {fx}, was not logged: values computed while training show records without noise. Log in "
            "validation_step, on records that are not trained on; or PrivateTraining(..., log_not_private=True), and keep "
            "the log as secret as the data."
        )
