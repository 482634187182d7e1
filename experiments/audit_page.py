"""docs/audit.md, from the stored results of experiments/audit.py."""

from collections.abc import Iterable, Sequence
from typing import Any

HEAD = """# Is the claimed epsilon true?

An accountant gives an upper bound on the privacy loss of a run, provided that the code does what the plan says. An
audit attacks the code and gives a lower bound. A lower bound above the claim proves, at a stated confidence, that
something is wrong. `clipless.auditing` runs such attacks through the public API, so the audited code is the code that
trains.

```sh
clipless audit --data digits --model linear --clipping auto-s --epsilon 3
clipless audit --data path/to/mnist --model cnn --epsilon 8 --canaries 5000 --games one-run --draw audit.svg --out audit.json
clipless audit --clipping dc-e --noise secure --json          # claimed_epsilon, lower_bound, confidence
```

It takes the arguments of `clipless train`, shows the time left, and exits with code 1 if a bound exceeds the claim or
if the noise is not as claimed. This page is written by `make audit` from
`docs/figures/audit.json`.

**What an audit costs.** It trains copies of the configuration and releases none of them. Canaries are synthetic: separate
directions, or noise with random labels. Every number it prints is about canaries; nothing is computed from real
records. But the one-run game trains on real records, so do not publish a model from an audit and do not reuse its seed.

**What a bound means.** An audit can refute a claim; it cannot prove one. A bound far below the claim means
that the attack was weak or the games were few, not that the run was more private than claimed.

## The games

**The step game** (`play`, `judge_step`). The model is the *canary model*: linear layers whose gradient is the record itself.
Its record has, in every group, the norm whose clipped gradient is largest. Weights stay fixed, so thousands of
releases come from the same mechanism. With a full batch and a policy with a statistic, one record is present or
absent, and the score is the log-likelihood ratio of gradient and statistic together. Otherwise each release holds 64
games, one along each coordinate. A fifth of the scores is used to choose a threshold; on the rest the two error rates
are bounded by Clopper-Pearson intervals.

- *The bound* is the epsilon of the noisiest sampled Gaussian that allows these rates, at the delta of the claim. It
  assumes that the release is Gaussian with some noise, on Poisson batches of the claimed rate. A bound above the claim
  refutes it without that assumption: no release within the claimed noise, sensitivity and sampling allows these rates.
  What is refuted is the plan's whole trade-off curve, of which epsilon at one delta is a point.
- *The plain bound* assumes nothing: the least epsilon for which (epsilon, delta)-differential privacy allows the
  rates. It is much lower, because observing an event of probability 1e-5 takes millions of games.
- *The pair bound* assumes that both kinds of scores are normal with equal variance, and uses all of them.
- *Tests of the noise*, on coordinates that no record touches: mean and standard deviation in every group, normal
  shape, equal size in every step, no correlation between any two steps or coordinates. Their joint
  false-alarm rate is 1e-6. Thresholds are recomputed from the released statistics and must equal those that were used.

**The whole-run game** (`play_runs`, `judge_runs`): hundreds of complete trainings of the canary model, seen by final weights
only or by all gradients. Only here is the sampling of batches audited over several steps.

**One run** (`one_run`, `judge_canaries`): many canaries in one training of any classifier, each in or out at random.
A canary that is out stays in the data set with its loss multiplied by zero, so the number of records, which is public,
does not change. *Crafted* canaries have a coordinate each, in a table beside the model; *random* ones are noise with
random classes, seen through dot products of their gradients with the released ones (white-box) or through the
decrease of their loss (black-box). The confidence is divided over all analyses and numbers of guesses tried.

- *Steinke, Nasr, Jagielski (2023)*: any mechanism; the right guesses are below a binomial, with their correction for
  delta.
- *Mahloujifar, Melis, Chaudhuri (2025)*: the recursion for a trade-off function, here a Gaussian's. It refutes a
  mu-Gaussian mechanism without further assumption; epsilon at delta is that of the largest mu refuted. Sampled
  steps are not quite Gaussian: their tails are heavier at the same epsilon, so this bound is too low for them.
- *Independent*: crafted canaries have coordinates of their own, so if the noise on different coordinates is
  independent, as claimed and as the step game tests, each is a game of its own, and Clopper-Pearson on two sets of
  scores is exact.
- *Gauss*: takes the values of the scores instead of guesses, as Agrawal et al. (2026) do, and is derived from scratch
  (`src/clipless/auditing/gauss.py`). A canary's release in one step, over the claimed standard deviation, is
  x = s·(Z + κ·B/σ): Z is normal, B = 1 if the canary is in and drawn, s is any size of the noise, and κ says how much
  farther than claimed a canary moves a release. By the claim s = 1 and κ ≤ 1. The statistic is the mean log-likelihood
  score of those that are in less that of those that are out. Its law is computed exactly, from characteristic
  functions, so that few steps, rare draws and few canaries need no central limit, which would be false here: in two
  epochs one canary in seven is never drawn. s is bounded by the chi-square law of those that are out, with a tenth of
  the error probability. The bound is the epsilon of the claimed steps with their noise divided by the largest κ that is
  refuted.

    *What its confidence rests on*: noise that is normal, of one size, and independent over coordinates and steps, and
    Poisson batches of the claimed rate. If training does what the plan says, all of that is true, so a bound above the
    claim refutes the plan at the stated confidence without further assumption. (Another mechanism with the same epsilon
    is not what it tests.) As a bound below the claim it is as good as these assumptions; the step game tests the first,
    the whole-run game the second. Canaries that move releases by different amounts only lower it. Not for random
    canaries, whose gradients overlap, so that neither noise nor canaries along them are independent; not for estimated
    norms (`gradients="jl"`), with which a record moves a release by a random amount.

**Any small model** (`play_model`): full batches with and without one given record, told apart by a learned direction.
It detects a record that acts through others.
"""

ZOO_HEAD = """
## A zoo of broken privacy

The tests build each of these faults into clipless (`tests/auditing/sabotage.py`), at multiplier 1 unless the game says
otherwise. Each is caught with the number of releases given, at a confidence of 99.9 % for bounds. Sound training
passes the same games.
"""

CANNOT = """
Faults of several processes are shown as one process would see them: noise of one of two ranks has 1/√2 of the
standard deviation, noise of both √2 times.

**What the audit cannot catch.**

- More noise than claimed: the tests of the noise find it, but no bound can.
- A norm underestimated by a few percent: the step game needs about 1/x² times as many games for a fault of size x.
- A fault that only some layers or models show: the canary model is linear layers. `clipless.check` compares the engine with
  a loop over single records on your own model, and the first steps of every run check themselves.
- Shuffled batches in the step game, which sees one step: the whole-run game catches them, where the noise is small.
- What depends on a secret: a seed that was published, noise that can be predicted. The numbers look right.
- Floating-point attacks on the last bits (docs/noise.md), timing, memory, and anything that leaves the process in another
  way.
- A wrong accountant, except where the games see it: bounds are converted by dp-accounting's own distributions, claims
  by clipless. This compares one step and eight steps, but not a thousand.
- A weak attack: black-box bounds with random canaries are low on sound and on slightly broken training alike.
"""

REFERENCES = """
## References

- T. Steinke, M. Nasr, M. Jagielski, *Privacy auditing with one (1) training run*, NeurIPS 2023.
- S. Mahloujifar, L. Melis, K. Chaudhuri, *Auditing f-differential privacy in one run*, ICML 2025.
- A. Agrawal, Y. Wei, J. Singh, M. Magdon-Ismail, V. Zikas, *Let's ask Gauss: improved one-run privacy auditing*,
  2026.
- M. Nasr, J. Hayes, T. Steinke, B. Balle, F. Tramèr, M. Jagielski, N. Carlini, A. Terzis, *Tight auditing of
  differentially private machine learning*, USENIX Security 2023.
- M. S. M. S. Annamalai, E. De Cristofaro, *Nearly tight black-box auditing of differentially private machine
  learning*, NeurIPS 2024.
- S. Yoon, W. Jeung, A. No, *Adversarial sample-based approach for tighter privacy auditing in final model-only
  scenarios*, 2024.
"""


def page(stored: dict[str, Any]) -> str:
    """The page, as Markdown."""
    made = stored["made"]
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    parts = [
        HEAD,
        _steps(stored["steps"]),
        _runs(stored["runs"]),
        _gauss(stored["gauss"]) if "gauss" in stored else "",
        ZOO_HEAD,
        _zoo(stored["zoo"]),
        CANNOT,
    ]
    parts += [
        _mnist(stored["mnist"], stored["spread"]),
        f"\nMade on {made['date']}: {made['machine']}, {versions}.\n",
        REFERENCES,
    ]
    return "".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _number(value: float | str | None) -> str:
    return "-" if value is None else "any" if value == "inf" else f"{value:.2f}"


def _time(row: dict[str, Any]) -> str:
    """Processor time, which does not depend on what else the machine does; of older rows the clock's."""
    return f"{row['cpu_seconds']:.0f} s" if "cpu_seconds" in row else f"{row['seconds']:.0f} s by the clock"


def _share(row: dict[str, Any]) -> str:
    return f"{row['lower_bound'] / row['claimed_epsilon']:.0%}"


def _steps(rows: list[dict[str, Any]]) -> str:
    text = """
## One step, tightly

Multiplier 1, full batches, delta 1e-5, confidence 95 %: every clipping by name and every noise source
(`python experiments/audit.py --only steps`). The claim is the exact epsilon of the step. The bound counts errors
(Clopper-Pearson) and proves at least 85 % of the claim in every row, for the gradient alone and with a statistic, in as
many games as are given. With a statistic fewer are played, because each takes a step of its own. The pair bound needs
about a tenth of the games: `make test` holds it to 85 % with a statistic in 1,400, and the counted one without a
statistic in 60,000.
"""
    head = (
        "clipping",
        "noise",
        "seen",
        "games",
        "claimed",
        "bound",
        "of the claim",
        "pair bound",
        "plain bound",
        "noise as claimed",
    )
    cells = [
        [
            row["clipping"],
            row["noise"],
            row["seen"],
            f"{row['games']:,}",
            _number(row["claimed_epsilon"]),
            _number(row["lower_bound"]),
            _share(row),
            _number(row["pair_bound"]),
            _number(row["plain_bound"]),
            "yes" if row["sound"] else "no",
        ]
        for row in rows
    ]
    return text + _table(head, cells)


def _runs(rows: list[dict[str, Any]]) -> str:
    text = """
## Whole trainings

Trainings of 8 steps of the canary model under auto-s, 16 records in and 16 out, delta 1e-5, confidence 95 %. Times are
processor time, here and below, unless marked as that of a clock.
"""
    head = ("multiplier", "rate", "trainings", "seen", "games", "claimed", "bound", "of the claim", "Gauss", "time")
    cells = [
        [
            f"{row['multiplier']:g}",
            f"{row['rate']:g}",
            f"{row['trainings']}",
            row["seen"],
            f"{row['games']:,}",
            _number(row["claimed_epsilon"]),
            _number(row["lower_bound"]),
            _share(row),
            _number(row["pair_bound"]),
            _time(row),
        ]
        for row in rows
    ]
    return text + _table(head, cells)


def _gauss(rows: list[dict[str, Any]]) -> str:
    text = """
## False alarms of the Gaussian form

Simulated trainings that keep their claim exactly, with half of the canaries in: how many are refuted at 95 %, which is
to be 5 % at most, and the bound of the middle one of 25.
"""
    head = ("rate", "multiplier", "steps", "canaries", "trainings", "refuted", "claimed", "bound", "of the claim")
    cells = [
        [
            f"{row['rate']:g}",
            f"{row['multiplier']:g}",
            f"{row['steps']}",
            f"{row['canaries']:,}",
            f"{row['runs']:,}",
            f"{row['refuted'] / row['runs']:.1%}",
            _number(row["claimed_epsilon"]),
            _number(row["lower_bound"]),
            _share(row),
        ]
        for row in rows
    ]
    return text + _table(head, cells)


def _zoo(rows: list[dict[str, Any]]) -> str:
    head = ("what is broken", "releases", "claimed", "bound", "given away by")
    return _table(
        head,
        [
            (row["name"], _releases(row), _number(row["claimed_epsilon"]), _number(row["lower_bound"]), _signs(row))
            for row in rows
        ],
    )


def _releases(row: dict[str, Any]) -> str:
    return f"{row['releases']:,}" + (" trainings" if row["name"].startswith("shuffled") else "")


def _signs(row: dict[str, Any]) -> str:
    signs = {"bound": "the bound", "thresholds": "a threshold that does not follow", "noise": ", ".join(row["tests"])}
    return "; ".join(signs[sign] for sign in row["by"]) if row["caught"] else "**not caught**"


def _mnist(rows: list[dict[str, Any]], spread: list[dict[str, Any]]) -> str:
    first = rows[0]
    arguments = first["arguments"]
    text = f"""
## One run on MNIST

The {arguments["model"]} of 26,010 parameters under {arguments["clipping"]}, {arguments["epochs"]} epochs of expected
batches of {arguments["batch_size"]:,}, delta {arguments["delta"]:g}, SGD with momentum, learning rate
{arguments["lr"]:g}: a short training, since the audit is about the claim and not the accuracy.
Confidence 95 % for all bounds of a row together.
"""
    head = (
        "claimed",
        "canaries",
        "seen",
        "Steinke et al.",
        "Mahloujifar et al.",
        "independent",
        "Gauss",
        "of the claim",
        "right guesses",
        "time",
    )
    cells = [
        [_number(game["claimed_epsilon"]), f"{game['canaries']:,}", game["seen"]]
        + [_number(game.get(name)) for name in ("steinke", "mahloujifar", "independent", "gauss")]
        + [_share(game), f"{game['right']} of {game['guesses']}", _time(row)]
        for row in rows
        for game in row["games"]
    ]
    best = {row["arguments"]["epsilon"]: _share(row) for row in rows if row["audit"]["kind"] == "crafted"}
    number = first["audit"]["canaries"]
    ours = f"Here {number} canaries in one training prove {best[8.0]} of an epsilon of 8 and {best[3.0]} of one of 3."
    return text + _table(head, cells) + _spread(spread) + MNIST_TAIL + ours + "\n"


def _spread(rows: list[dict[str, Any]]) -> str:
    each = [f"{row['mean']:.0%} ± {row['stddev']:.0%} of the claim at epsilon {row['epsilon']:g}" for row in rows]
    return f"""
One training is one draw. In {rows[0]["runs"]} simulated trainings with {rows[0]["canaries"]:,} canaries that keep their
claim exactly, the Gaussian bound was {" and ".join(each)} (mean ± standard deviation).
"""


MNIST_TAIL = """
Random canaries prove nothing here: in two epochs a small network under this noise does not learn 500 images of noise.

Published audits of comparable trainings, by their own abstracts and introductions. In one run: 1.8 at epsilon 4 on
CIFAR-10, white-box (Steinke et al. 2023). From many trainings on MNIST at epsilon 10: 6.48 on all records and 7.21 on
1000 of them (Annamalai and De Cristofaro 2024, final model, worst-case initial weights), 4.91 (Yoon et al. 2024, final
model, crafted inputs); these see less than a white-box audit. With every gradient in sight Nasr et al. (2023) report
nearly tight bounds from two trainings. Mahloujifar et al. (2025) and Agrawal et al. (2026) say that theirs are tighter
than Steinke's; no figure of theirs for MNIST is known to us. The columns above are these analyses, the Gaussian one in
our own form.
"""
