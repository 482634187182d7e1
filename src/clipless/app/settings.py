"""Everything that decides a training run or an audit besides the data, as plain values. What they mean is computed
elsewhere (`clipless.app.training.settings`), so that the command line can show the defaults without loading torch."""

from dataclasses import dataclass

from clipless import defaults
from clipless.app import names
from clipless.arguments import named, whole
from clipless.errors import InvalidArgument

LEAST_RELEASES = 100
CHECKPOINT_SECONDS = 60.0
MOMENTUM = 0.9


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run.

    `clipping` is a name, a text such as `dc-p(percentile=0.3)`, or "none", which trains without privacy; `epsilon`, `delta`
    and `accountant` are then unused. `delta=None` means min(1e-5, 1/(10 N)), `lr=None` the optimizer's default, `seed=None`
    randomness from the operating system, `noise=None` secure noise, or seeded noise if there is a seed. A `noise_multiplier`
    replaces `epsilon`. `momentum` (of sgd) and `weight_decay` are the optimizer's own unless given. `averaging` is the decay
    of a moving average of the weights, which is tested and saved in place of the last ones; 0 means none. The model is
    tested after every `test_every` epochs and at the end. `loss` names a function `package.module:function` of (output, y)
    that returns one loss for each record; None is the task's own.
    """

    model: str = "mlp"
    clipping: str = defaults.CLIPPING
    epsilon: float = 3.0
    delta: float | None = None
    epochs: int = 40
    batch_size: int = 256
    optimizer: str = "sgd"
    lr: float | None = None
    seed: int | None = None
    accountant: str = defaults.ACCOUNTANT
    noise: str | None = None
    noise_multiplier: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    lr_schedule: str = "constant"
    averaging: float = 0.0
    unit_gradients: bool = False
    test_every: int = 1
    loss: str | None = None

    @property
    def private(self) -> bool:
        return self.clipping != names.NO_CLIPPING


# The settings that a search may vary.
TUNABLE = (
    "model",
    "clipping",
    "epochs",
    "batch_size",
    "optimizer",
    "lr",
    "lr_schedule",
    "momentum",
    "weight_decay",
    "averaging",
    "unit_gradients",
)


@dataclass(frozen=True)
class AuditSettings:
    """How much is played. `releases=None` stands for 20,000 games of the step, or 3000 where a statistic is released
    beside the gradient, since each then takes a step of its own."""

    games: tuple[str, ...] = ("step", "one-run")
    releases: int | None = None
    canaries: int = 1000
    kind: str = "crafted"
    trainings: int = 200
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for game in self.games:
            named("game", game, dict.fromkeys(names.GAMES))
        if not self.games or len(set(self.games)) < len(self.games):
            raise InvalidArgument(f"name each game once, one at least of {', '.join(names.GAMES)}.")
        if not 0.5 < self.confidence < 1:
            raise InvalidArgument(f"confidence is {self.confidence}: choose one above 0.5 and below 1, such as 0.95.")
        whole("trainings", self.trainings)
        if self.releases is not None and whole("releases", self.releases) < LEAST_RELEASES:
            raise InvalidArgument(f"releases is {self.releases}: fewer than {LEAST_RELEASES} games prove nothing.")
        whole("the number of canaries", self.canaries)
        named("kind of canary", self.kind, dict.fromkeys(names.CANARY_KINDS))
