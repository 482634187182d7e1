"""What (ε, δ)-differential privacy means for one person: bounds as functions, and the promise in words."""

import math
from typing import Any

from clipless.accounting import Spent, StepEvent
from clipless.accounting.selection import METHODS
from clipless.app.report import RunReport
from clipless.app.report_page.values import PUBLIC, SIZE, MarkedText, percent_up
from clipless.rounding import rounded_up

EXAMPLE = 0.01
Sentence = list[MarkedText]


def odds_factor(epsilon: float) -> float:
    """e^ε: how much more probable any outcome can become by one record, apart from δ.

    >>> round(odds_factor(1.0), 3), odds_factor(1000.0)
    (2.718, inf)
    """
    return math.exp(epsilon) if epsilon < 700 else math.inf


def most_probable(probability: float, epsilon: float, delta: float) -> float:
    """The largest probability that an outcome can have with a record, if it has this one without: min(1, e^ε p + δ).

    >>> most_probable(0.01, 0.0, 0.0), most_probable(0.5, 2.0, 0.0)
    (0.01, 1.0)
    """
    return min(1.0, odds_factor(epsilon) * probability + delta)


def advantage(epsilon: float, delta: float) -> float:
    """The largest TPR − FPR of any test of whether a record was used: tanh(ε/2) + δ (1 − tanh(ε/2)).

    (ε, δ)-DP demands TPR ≤ e^ε FPR + δ and 1 − FPR ≤ e^ε (1 − TPR) + δ. The sum of both errors is least where the lines
    cross, at FPR = FNR = (1 − δ) / (1 + e^ε), so TPR − FPR ≤ 1 − 2 (1 − δ) / (1 + e^ε), which is this.

    >>> advantage(0.0, 0.0), advantage(0.0, 0.25), advantage(math.inf, 0.0)
    (0.0, 0.25, 1.0)
    """
    without = math.tanh(epsilon / 2)
    return without + delta * (1 - without)


def right_guesses(epsilon: float, delta: float) -> float:
    """The largest probability of guessing right whether a record was used, if a fair coin decided: (1 + advantage) / 2.

    >>> right_guesses(0.0, 0.0), round(right_guesses(math.log(3), 0.0), 9)
    (0.5, 0.75)
    """
    return (1 + advantage(epsilon, delta)) / 2


def promise(reading: RunReport, spent: Spent) -> dict[str, list[Sentence]]:
    """The promise of a private run in paragraphs, each under its question."""
    return {
        "Who is protected?": [_protected(reading)],
        "Against whom?": [_attacker(reading)],
        "What is promised?": [_promised(reading, spent)],
        "How is it kept?": _kept(reading),
        "What does that mean for one person?": _meaning(spent),
        "What is not promised?": [
            [
                MarkedText(
                    "That nothing can be learned about a person: what the other records show is "
                    "learned with or without theirs. Files marked as not private below are not covered, nor is any other "
                    "run on the same records: the epsilons of several runs add up."
                )
            ]
        ],
    }


def _protected(reading: RunReport) -> Sentence:
    data = reading.record.get("data")
    name = f" of the data set {data}" if data else ""
    size = reading.plan["dataset_size"]
    count = (
        [MarkedText(f"Each training record{name}. How many there are is secret")]
        if size is None
        else [
            MarkedText(f"Each training record{name}, of which there are"),
            MarkedText(f"{size:,}", PUBLIC, SIZE),
        ]
    )
    return [
        *count,
        MarkedText(
            ". A record is one row of the data. A person with several rows is protected less: with k rows, epsilon is at "
            "most k times as large, at a delta that is at most k·e^((k-1)ε) times as large."
        ),
    ]


def _attacker(reading: RunReport) -> Sentence:
    noise = {
        "secure": " The noise is computed with AES-256: to remove it, one would have to break that cipher, or to obtain a "
        "key of this run.",
        "seeded": " To remove the noise, it is enough to know its seed.",
        "device": " On a GPU the noise comes from torch's generator, which is not cryptographic: whoever predicts its "
        "numbers can remove it.",
    }
    plan = reading.plan
    alone = "tuning" in plan and not METHODS[plan["tuning"]["method"]].releases_all
    limit = ", but nothing of the other runs of the search" if alone else ""
    return [
        MarkedText(
            f"Anyone who sees the final model, all models in between and everything the run released{limit}, and who may "
            "know all other records. What they compute from it later is covered too."
            + noise.get(plan.get("noise", ""), "")
        )
    ]


def _promised(reading: RunReport, spent: Spent) -> Sentence:
    kind = f"({rounded_up(spent.epsilon)}, {rounded_up(spent.delta)})-differential privacy"
    relation = f"Which data sets are neighbours: {reading.plan['neighbouring']}. "
    if math.isinf(spent.epsilon):
        return [MarkedText("Nothing: the epsilon of what this run released is infinite.")]
    return [
        MarkedText(
            f"{kind}. {relation}Any outcome of the training, and of whatever is done with the model later, is at most e^ε = "
            f"{rounded_up(odds_factor(spent.epsilon))} times as probable as with a neighbouring data set, plus δ = "
            f"{rounded_up(spent.delta)}."
        )
    ]


def _kept(reading: RunReport) -> list[Sentence]:
    plan: dict[str, Any] = reading.plan
    if "tuning" in plan:
        return [_searched(plan["tuning"])]
    rate, batch = percent_up(plan["sample_rate"]), plan["expected_batch"]
    poisson = f"each record independently with probability {rate} ({batch:,} records expected)"
    drawn = poisson if plan["sampling"] == "poisson" else f"by {plan['sampling']} sampling, {batch:,} records expected"
    events = (event for event, _ in reading.ledger.events)
    statistic = any(isinstance(event, StepEvent) and event.statistic_multipliers for event in events)
    released = (
        "the sum of all is released with Gaussian noise, and so is a statistic of their lengths from which the next bound "
        f"follows. Both together are worth noise of {plan['noise_multiplier']:.4g} times the bound"
        if statistic
        else f"the sum of all is released with Gaussian noise of {plan['noise_multiplier']:.4g} times that bound"
    )
    estimated = ", which is estimated, and epsilon accounts for the error" if "projections" in plan else ""
    return [
        [
            MarkedText(
                f"In each of {plan['steps']:,} planned steps a batch is drawn, {drawn}. The gradient of each record is "
                f"scaled to a bounded length{estimated}; {released}. Nothing else of the batch is shown."
            )
        ]
    ]


def _searched(search: dict[str, Any]) -> Sentence:
    """How a search keeps the promise, and for which of its runs."""
    count, method = len(search["candidates"]), search["method"]
    if METHODS[method].releases_all:
        how = f"By training each of {count} candidates with noise, and choosing one by its score on the test records. "
        return [MarkedText(how + "Epsilon covers all of these runs.")]
    return [
        MarkedText(
            f"By training candidates drawn at random from {count}, with noise, and releasing the best by its score on the "
            f"test records ({method}). Epsilon covers the released run alone: the other runs, how many there were and how "
            "long the search took are not for others to see."
        )
    ]


def _meaning(spent: Spent) -> list[Sentence]:
    if math.isinf(spent.epsilon):
        return [[MarkedText("There is no bound on what can be learned about one person.")]]
    worst = percent_up(most_probable(EXAMPLE, spent.epsilon, spent.delta))
    guess, edge = right_guesses(spent.epsilon, spent.delta), advantage(spent.epsilon, spent.delta)
    return [
        [
            MarkedText(
                f"Something that would happen to them through this model with a chance of {percent_up(EXAMPLE)} had their "
                f"record been left out, happens with a chance of at most {worst} now that it was used."
            )
        ],
        [
            MarkedText(
                "An attacker who knows all other records, and for whom a fair coin decided whether this one was used, "
                f"guesses right with a probability of at most {percent_up(guess)}; without seeing anything it is 50 %. The "
                f"rate of right alarms exceeds that of false ones by at most {percent_up(edge)}. These are worst "
                "cases; no attack need come near."
            )
        ],
    ]
