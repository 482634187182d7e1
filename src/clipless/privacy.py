"""Privacy: make_private's privacy arguments in one frozen record, for trainers and configuration files."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from clipless import arguments, defaults
from clipless.accounting import ACCOUNTANTS
from clipless.clipping import CLIPPINGS, Clipping
from clipless.errors import InvalidArgument, InvalidType
from clipless.foreign import FOREIGN_NAMES
from clipless.neighbours import ZERO_OUT, refuse_unclear_rate
from clipless.noise import chosen_noise
from clipless.phases import Schedule, as_schedule, schedule

_OF_THE_RUN = (
    "batch_size", "epochs", "steps", "micro_batch", "memory", "loss_reduction", "unit_gradients", "kernels", "check",
    "group",
)  # fmt: skip


@dataclass(frozen=True)
class Privacy:
    """What is promised and how: the arguments of `make_private` that are about privacy, with its defaults.

    Data, batch size and length of a run are not part of it, but `sample_rate` is, which `neighbours="add-remove"` needs.
    Values are checked when the record is made, as far as that is possible without model and data. The seed is not shown:
    whoever knows it can subtract the noise.

    >>> privacy = Privacy(epsilon=3.0, clipping="auto-v")
    >>> privacy
    Privacy(epsilon=3.0, delta=None, noise_multiplier=None, clipping='auto-v', accountant='pld', neighbours='zero-out', ...)
    >>> private = make_private(model, optimizer, data, **privacy.arguments(), batch_size=8, epochs=2)  # doctest: +SKIP
    """

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    clipping: str | Clipping | Schedule = defaults.CLIPPING
    accountant: str = defaults.ACCOUNTANT
    neighbours: str = ZERO_OUT
    sample_rate: float | None = None
    noise: str | None = None
    seed: int | None = field(default=None, repr=False)
    allow_overspend: bool = False
    gradients: str = "exact"
    projections: int = defaults.PROJECTIONS

    def __post_init__(self) -> None:
        _refuse_unclear_budget(self.epsilon, self.noise_multiplier)
        if self.delta is not None:
            arguments.failure_probability(self.delta)
        as_schedule(self.clipping)
        arguments.named("accountant", self.accountant, ACCOUNTANTS)
        refuse_unclear_rate(self.neighbours, self.sample_rate, self.delta)
        chosen_noise(self.noise, self.seed)
        if not isinstance(self.allow_overspend, bool):
            raise InvalidType(f"allow_overspend must be True or False, got {self.allow_overspend!r}.")
        arguments.named("gradients", self.gradients, dict.fromkeys(("exact", "jl")))
        arguments.whole("projections", self.projections)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for `make_private`."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Privacy":
        """A record from plain data, such as a table of a TOML, YAML or JSON file.

        `clipping` is a name, a table of a name and its options, or a list of such tables, each with its `share` of the
        steps. Unknown names are refused.

        >>> Privacy.from_dict({"epsilon": 3, "clipping": {"name": "dc-p", "percentile": 0.6}}).clipping.policy.percentile
        0.6
        >>> late = [{"share": 0.9, "name": "abadi", "threshold": 0.5}, {"share": 0.1, "name": "global"}]
        >>> Privacy.from_dict({"noise_multiplier": 1.1, "clipping": late}).clipping.edges(100)
        [0, 90, 100]
        """
        if not isinstance(config, Mapping):
            raise InvalidType(f"Privacy.from_dict takes a mapping of names to values, got {type(config).__name__}.")
        known = [item.name for item in fields(cls)]
        for name in config:
            if name not in known:
                raise _unknown(name, known)
        chosen = dict(config)
        if "clipping" in chosen:
            chosen["clipping"] = _clipping_of(chosen["clipping"])
        return cls(**chosen)


def _refuse_unclear_budget(epsilon: float | None, noise_multiplier: float | None) -> None:
    """Raises unless exactly one of them is given, and is a usable number."""
    if epsilon is not None and noise_multiplier is not None:
        raise InvalidArgument("epsilon= and noise_multiplier= contradict each other: give one of them.")
    if epsilon is not None:
        arguments.target_epsilon(epsilon)
    elif noise_multiplier is not None:
        arguments.positive("noise_multiplier", noise_multiplier)
    else:
        raise InvalidArgument("give epsilon=, the privacy budget (3.0 is a common choice), or noise_multiplier=.")


def _unknown(name: object, known: Sequence[str]) -> InvalidArgument:
    if name in _OF_THE_RUN:
        return InvalidArgument(f"{name} is not part of Privacy: give it to make_private, or to the trainer, beside it.")
    if name in FOREIGN_NAMES:
        return InvalidArgument(f"Privacy has no {name}. What you mean is {FOREIGN_NAMES[str(name)]}.")
    return arguments.unknown_name("setting of Privacy", name, known)


def _clipping_of(config: object) -> str | Clipping | Schedule:
    """The clipping that plain data describe: a name, a table, or a list of tables with shares."""
    if isinstance(config, Mapping):
        return _clipping_of_table(config)
    if isinstance(config, list | tuple):
        if not all(isinstance(part, Mapping) and "share" in part for part in config):
            raise InvalidArgument(
                "a list of clippings is a schedule, and each needs its share of the steps, such as "
                "{share = 0.95, name = 'abadi'}."
            )
        return schedule([(part["share"], _clipping_of_table(part)) for part in config])
    return config  # type: ignore[return-value]  # a name, or refused by Privacy itself


def _clipping_of_table(table: Mapping[str, Any]) -> Clipping:
    if "name" not in table:
        raise InvalidArgument("a clipping needs its name, such as {name = 'dc-p', percentile = 0.6}.")
    make = arguments.named("clipping", table["name"], CLIPPINGS)
    options = {name: value for name, value in table.items() if name not in ("name", "share")}
    known = inspect.signature(make).parameters
    for name in options:
        if name not in known:
            raise arguments.unknown_name(f"option of clipping {table['name']!r}", name, known)
    return make(**options)
