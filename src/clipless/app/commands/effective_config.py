"""The effective configuration of a command, as a file that repeats it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from clipless.app.data import OwnData
from clipless.app.options.data import DataGroup
from clipless.app.settings import TrainingSettings
from clipless.app.toml_text import toml_text
from clipless.errors import InvalidArgument

HEADER = (
    "# The effective configuration; repeat it with:  clipless {command} --config config.toml\n"
    "# Paths are relative to the folder in which it was started. No key and no seed is ever written here.\n"
)


def config_text(command: str, data: DataGroup, own: OwnData, options: Mapping[str, Any]) -> str:
    """The text of the file: the data, then these options; tables, such as the rules of columns, come last. Raises
    InvalidArgument for names that are not text: a run would fail at its end, when they are stored."""
    shown = {name: value for name, value in asdict(data).items() if name != "schema" and value not in (None, [], ())}
    rules = {"made_from": own.made_from, "columns": dict(own.columns)} if own.columns else {}
    for name, value in {**shown, **options}.items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"--{name.replace('_', '-')} is not UTF-8 text, which the files of a run are: rename the file, or give it "
                "a link with another name (ln -s)."
            ) from None
    return HEADER.format(command=command) + toml_text({**shown, **options, **rules})


def run_options(settings: TrainingSettings) -> dict[str, Any]:
    """The options of a run. A seed is left out: whoever knows it can subtract the noise."""
    chosen = {name: value for name, value in asdict(settings).items() if name not in ("seed", "test_every")}
    if settings.noise_multiplier is not None:
        del chosen["epsilon"]
    if not chosen["unit_gradients"]:
        del chosen["unit_gradients"]
    return chosen
