"""Clippings as text: every number of every rule and policy, schedules, and what is refused."""

import inspect

import pytest

from clipless.app import clippings
from clipless.clipping import CLIPPINGS, Clipping
from clipless.errors import CliplessError
from clipless.phases import Schedule

NUMBERS = [
    (name, parameter)
    for name, make in CLIPPINGS.items()
    for parameter in inspect.signature(make).parameters
    if parameter not in ("rule", "groups", "allocation")
]


@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_name_alone_is_the_clipping_with_its_defaults(name: str) -> None:
    assert clippings.parse(name) == clippings.parse(f" {name}() ") == CLIPPINGS[name]()


@pytest.mark.parametrize(("name", "parameter"), NUMBERS)
def test_every_number_can_be_set(name: str, parameter: str) -> None:
    value = 7 if parameter == "bins" else 0.37
    expected = CLIPPINGS[name](**{parameter: value})
    assert clippings.parse(f"{name}({parameter}={value})") == expected != CLIPPINGS[name]()
    assert clippings.parse(clippings.with_parameter(name, parameter, str(value))) == expected


def test_names_lists_and_several_parameters() -> None:
    made = clippings.parse("dc-p(percentile=0.3, bins=30, rule=auto-s, groups=per-layer)")
    assert made == CLIPPINGS["dc-p"](percentile=0.3, bins=30, rule="auto-s", groups="per-layer")  # type: ignore[call-arg]
    assert clippings.parse("abadi(threshold=[1, 2.5], groups=per-layer)").policy.thresholds  # type: ignore[union-attr]


def test_a_parameter_that_is_set_again_replaces_the_first() -> None:
    assert (
        clippings.with_parameter("dc-p(percentile=0.1, bins=9)", "percentile", "0.9") == "dc-p(bins=9, percentile=0.9)"
    )


def test_a_schedule_has_phases_with_numbers_of_their_own() -> None:
    made = clippings.parse("schedule(0.95 abadi(threshold=2), 0.05 global(cutoff=100, threshold=1))")
    assert isinstance(made, Schedule)
    assert made.edges(200) == [0, 190, 200]
    assert [part.policy.thresholds(part.policy.init(_setting())).item() for _, part in made.parts] == [2.0, 1.0]


def _setting():  # type: ignore[no-untyped-def]
    from clipless.thresholds import Setting

    return Setting(1)


def started(text: str) -> None:
    made = clippings.parse(text)
    assert isinstance(made, Clipping)
    made.start(1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("autos", "auto-s"),
        ("", "is not a clipping"),
        ("dc-p(", "is not a clipping"),
        ("dc-p(percentil=0.3)", "percentile"),
        ("dc-p(0.3)", "names no parameter"),
        ("dc-p(percentile=)", "names no parameter"),
        ("dc-p(percentile=0.3, percentile=0.4)", "given twice"),
        ("dc-p(percentile=1.5)", "between 0 and 1"),
        ("dc-p(percentile=__import__('os'))", "number"),
        ("dc-p(bins=2.5)", "whole number"),
        ("auto-s(gamma=0)", "positive"),
        ("abadi(threshold=big)", "number"),
        ("schedule(abadi)", "share of the steps"),
        ("schedule(0.5 abadi)", "add up"),
        ("schedule(0.5 abadi, 0.5 schedule(1 abadi))", "within a schedule"),
        ("abadi; auto-s", "is not a clipping"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(CliplessError, match=words):
        started(text)


def test_a_parameter_of_a_schedule_is_ambiguous() -> None:
    with pytest.raises(CliplessError, match="any phase"):
        clippings.with_parameter("schedule(1 abadi)", "threshold", "2")
