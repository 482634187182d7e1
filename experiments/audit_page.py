"""docs/audit.md, from the stored results of experiments/audit.py."""

from collections.abc import Iterable, Sequence
from typing import Any

HEAD = """# Is the claimed epsilon true?

An accountant says how much privacy a run costs at most, if the code does what the plan says. An audit attacks the
code and says how much it costs at least. The two must not cross: a lower bound above the claim is a proof, at a
stated confidence, that something is wrong. `clipless.auditing` plays such attacks through the public API, so that the
code that is audited is the code that trains.

```
clipless audit --data digits --model linear --clipping auto-s --epsilon 3
clipless audit --data path/to/mnist --model cnn --epsilon 8 --canaries 5000 --games one-run --draw audit.svg --out audit.json
clipless audit --clipping dc-e --noise secure --json          # claimed_epsilon, lower_bound, confidence
```

It takes the arguments of `clipless train`, shows the time left, and ends with exit code 1 if a bound exceeds the
claim or if the noise is not what it is said to be. This page is written by `make audit` from
`docs/figures/audit.json`.

**What an audit costs.** It trains copies of the configuration and releases nothing of them. Canaries are synthetic:
directions of their own, or noise with random labels. Every number it prints is about canaries; of real records it
computes and prints nothing. But real records are trained on in the one-run game, so do not publish a model of an
audit or use its seed again.

**What a bound means.** An audit can refute a claim; it cannot prove one. A bound far below the claim says that the
attack was weak, or the data few, not that the run was more private than claimed.

## The games

**The step game** (`play`, `judge_step`). The model is the *canary model*: linear layers whose gradient is the record itself.
Its record has the norm at which the clipping rule lets most through, in every group. Weights stay fixed, so each of
thousands of releases is one of the same mechanism. With a full batch and a policy with a statistic, one record is
there or not, and the score is the log-likelihood ratio of gradient and statistic together. Elsewhere each release
holds 64 games, one along each coordinate. A fifth of the scores chooses a threshold; on the others the two error
rates are bounded by Clopper and Pearson.

- *The bound* is the epsilon of the noisiest sampled Gaussian that allows these rates, at the delta of the claim. It
  assumes that the release is Gaussian with some noise, on Poisson batches of the claimed rate. That a bound exceeds
  the claim needs no such assumption: no release within the claimed noise, sensitivity and sampling allows these
  rates. The claim that is refuted is the plan's whole trade-off curve, of which epsilon at one delta is a point.
- *The plain bound* assumes nothing: the least epsilon for which (epsilon, delta)-differential privacy allows the
  rates. It is much lower, because seeing a chance of 1e-5 takes millions of games.
- *The pair bound* takes both kinds of scores for normal with equal variance, and uses all of them.
- *Tests of the noise*, on coordinates that no record touches: mean and standard deviation in every group, normal
  shape, equal size in every step, no correlation between any two steps or coordinates. All together they have a
  false-alarm rate of 1e-6. Thresholds are computed again from the released statistics, and must be those that were
  used.

**The whole-run game** (`play_runs`, `judge_runs`): hundreds of complete trainings of the canary model, seen by final weights
only or by all gradients. Only here is the sampling of batches audited over several steps.

**One run** (`one_run`, `judge_canaries`): many canaries in one training of any classifier, each in or out by a coin.
A canary that is out keeps its place with its loss multiplied by zero, so the number of records, which is public,
stays the same. *Crafted* canaries have a coordinate each, in a table beside the model; *random* ones are noise with
random classes, seen in dot products of their gradients with the released ones (white-box) or by how far their loss
came down (black-box). Numbers of guesses tried, and analyses, share the confidence.

- *Steinke, Nasr, Jagielski (2023)*: any mechanism; the right guesses are below a binomial, with their correction for
  delta.
- *Mahloujifar, Melis, Chaudhuri (2025)*: the recursion for a trade-off function, here a Gaussian's. It refutes a
  mu-Gaussian mechanism without further assumption; epsilon at delta is that of the largest mu refuted. Sampled
  steps are not quite Gaussian: their tails are heavier at the same epsilon, so that this understates.
- *Independent*: crafted canaries have coordinates of their own, so if the noise on different coordinates is
  independent, as claimed and as the step game tests, each is a game of its own, and Clopper-Pearson on two sets of
  scores is exact. The Gaussian pair of Agrawal et al. (2026) rests on the same independence; ours needs no central
  limit, since it counts.

**Any small model** (`play_model`): full batches with and without one given record, told apart by a learned direction.
It sees a record that acts through others.
"""

ZOO_HEAD = """
## A zoo of broken privacy

Each of these is built into clipless by the tests (`tests/auditing/sabotage.py`), at multiplier 1 unless the game says
otherwise, and is caught with the number of releases given, at a confidence of 99.9 % for bounds. Sound training
passes the same games.
"""

CANNOT = """
Faults of several processes are shown as one process would see them: noise of one of two ranks has 1/√2 of the
standard deviation, noise of both √2 times.

**What the audit cannot catch.**

- More noise than claimed is found by the tests of the noise, as a departure; no bound can exceed a claim by it.
- A norm underestimated by a few percent: the step game needs about 1/x² times as many games for a fault of size x.
- A fault that only some layers or models show: the canary model is linear layers. `clipless.check` compares the engine with
  a loop over single records on your own model, and the first steps of every run check themselves.
- Shuffled batches in the step game, which sees one step: the whole-run game catches them, where the noise is small.
- What depends on a secret: a seed that was published, noise that can be predicted. The numbers look as they should.
- Floating-point attacks on the last bits (docs/noise.md), timing, memory, and whatever leaves the process by another
  way.
- A wrong accountant, but for the part that the games see: bounds are converted by dp-accounting's own distributions,
  claims by clipless. One step and eight are compared this way, a thousand are not.
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
    parts = [HEAD, _steps(stored["steps"]), _runs(stored["runs"]), ZOO_HEAD, _zoo(stored["zoo"]), CANNOT]
    parts += [_mnist(stored["mnist"]), f"\nMade on {made['date']}: {made['machine']}, {versions}.\n", REFERENCES]
    return "".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _number(value: float | str | None) -> str:
    return "-" if value is None else "any" if value == "inf" else f"{value:.2f}"


def _share(row: dict[str, Any]) -> str:
    return f"{row['lower_bound'] / row['claimed_epsilon']:.0%}"


def _steps(rows: list[dict[str, Any]]) -> str:
    text = """
## One step, tightly

Multiplier 1, full batches, delta 1e-5, confidence 95 %: every clipping by name and every noise source. The claim is
the exact epsilon of the step. Bounds for a statistic rest on fewer games, as each takes a step of its own.
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

Trainings of 8 steps of the canary model under auto-s, 16 records in and 16 out, delta 1e-5, confidence 95 %.
"""
    head = ("multiplier", "rate", "trainings", "seen", "games", "claimed", "bound", "of the claim", "time")
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
            f"{row['seconds']:.0f} s",
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


def _mnist(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    arguments = first["arguments"]
    text = f"""
## One run on MNIST

The {arguments["model"]} of 26,010 parameters under {arguments["clipping"]}, {arguments["epochs"]} epochs of expected
batches of {arguments["batch_size"]:,}, delta {arguments["delta"]:g}, SGD with momentum, learning rate
{arguments["lr"]:g}: a short training, since the claim and not the accuracy is at stake.
Confidence 95 % for all bounds of a row together.
"""
    head = (
        "claimed",
        "canaries",
        "seen",
        "Steinke et al.",
        "Mahloujifar et al.",
        "independent",
        "right guesses",
        "time",
    )
    cells = [
        [_number(game["claimed_epsilon"]), f"{game['canaries']:,}", game["seen"]]
        + [_number(game[name]) for name in ("steinke", "mahloujifar", "independent")]
        + [f"{game['right']} of {game['guesses']}", f"{row['seconds']:.0f} s"]
        for row in rows
        for game in row["games"]
    ]
    return text + _table(head, cells) + MNIST_TAIL


MNIST_TAIL = """
Random canaries prove nothing here: in two epochs a small network under this noise does not learn 500 images of noise.

Published audits of comparable trainings, by their own abstracts: on MNIST at epsilon 10, 6.48 on all records and 7.21
on 1000 of them (Annamalai and De Cristofaro 2024, final model, worst-case initial weights), 4.91 (Yoon et al. 2024,
final model, crafted inputs). These see less than a white-box audit. With every gradient in sight Nasr et al. (2023)
report nearly tight bounds from two trainings. Here 5000 canaries in one training prove 75 % of an epsilon of 8 and 47 %
of one of 3; the step game above proves more than 90 % of a step's.
"""
