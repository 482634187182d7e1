import itertools
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from clipless.accounting import ACCOUNTANTS, Ledger, Spent, StepEvent, epsilon
from clipless.accounting.events import EVENTS, registered
from clipless.errors import InvalidArgument, InvalidType

PLAIN = StepEvent(0.01, 1.1)
OTHER = StepEvent(0.01, 1.1, (8.0,))


def filled(*events):
    ledger = Ledger()
    for event in events:
        ledger.record(event)
    return ledger


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_an_empty_ledger_has_spent_nothing(name):
    assert Ledger().spent(1e-5, name) == Spent(0.0, 1e-5, 0, name)


def test_equal_neighbours_are_counted_together_in_order():
    ledger = filled(PLAIN, PLAIN, OTHER, PLAIN)
    assert ledger.events == ((PLAIN, 2), (OTHER, 1), (PLAIN, 1))
    assert ledger.steps == len(ledger) == 4
    assert repr(ledger) == "Ledger(steps=4, groups=3)"


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_spent_is_what_epsilon_says(name):
    assert filled(*[PLAIN] * 30).spent(1e-5, name).epsilon == epsilon(1.1, 0.01, 30, 1e-5, name)


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_every_step_is_charged(name):
    ledger = filled(*[PLAIN] * 200)
    before = ledger.spent(1e-5, name)
    for _ in range(50):
        ledger.record(OTHER)
    after = ledger.spent(1e-5, name)
    assert after.epsilon > before.epsilon
    assert (before.steps, after.steps) == (200, 250)


def test_spending_grows_step_by_step():
    ledger, spent = Ledger(), [0.0]
    for _ in range(40):
        ledger.record(PLAIN)
        spent.append(ledger.spent(1e-5).epsilon)
    assert all(later >= 0.999 * earlier for earlier, later in itertools.pairwise(spent))
    assert spent[-1] > spent[1]


def test_the_record_survives_json():
    ledger = filled(PLAIN, OTHER, OTHER)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert again.spent(1e-5) == ledger.spent(1e-5)
    assert "epsilon" not in json.dumps(ledger.to_dict())


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"events": 3},
        {"events": [{"event": PLAIN.to_dict(), "count": 0}]},
        {"events": [{"count": 1}]},
        {"events": [1]},
        {"events": [{"kind": "sneeze", "event": PLAIN.to_dict(), "count": 1}]},
        {"events": [{"kind": None, "event": PLAIN.to_dict(), "count": 1}]},
        {"events": [{"event": [1], "count": 1}]},
        {"events": [{"event": PLAIN.to_dict(), "count": 1, "note": "free"}]},
    ],
)
def test_a_damaged_record_is_refused(record):
    with pytest.raises(InvalidArgument):
        Ledger.from_dict(record)


def test_only_events_are_recorded():
    with pytest.raises(InvalidType, match="StepEvent"):
        Ledger().record(1.1)


def test_changing_what_was_returned_does_not_change_the_ledger():
    ledger = filled(PLAIN)
    ledger.to_dict()["events"].clear()
    assert ledger.steps == 1


def test_the_repr_says_what_was_spent_and_warns_of_an_approximation():
    assert repr(Spent(2.98, 1e-05, 1160, "pld")) == "Spent(epsilon=2.98, delta=1e-05, steps=1160, accountant='pld')"
    gdp = filled(PLAIN).spent(1e-5, "gdp")
    assert gdp.approximation
    assert str(gdp).endswith("accountant='gdp', approximation=True)")
    assert not filled(PLAIN).spent(1e-5, "rdp").approximation


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5])
def test_spent_refuses_a_delta_that_means_nothing(delta):
    with pytest.raises(InvalidArgument, match="delta"):
        Ledger().spent(delta)


@pytest.fixture
def Lump(monkeypatch):
    """An event that is no step, with a price that tells the delta it was given."""

    @dataclass(frozen=True)
    class Lump:
        kind: ClassVar[str] = "lump"
        price: float

        def epsilon(self, delta, accountant):
            return self.price + 1e4 * delta

        def to_dict(self):
            return {"price": self.price}

        @classmethod
        def from_dict(cls, record):
            return cls(record["price"])

    monkeypatch.setitem(EVENTS, "lump", Lump)
    return Lump


def test_other_events_are_added_with_equal_shares_of_delta(Lump):
    ledger = filled(PLAIN, PLAIN, Lump(1.0), Lump(1.0), PLAIN, Lump(0.5))
    spent = ledger.spent(1e-5)
    share = 1e-5 / 4
    assert spent.epsilon == pytest.approx(epsilon(1.1, 0.01, 3, share) + 2.5 + 3 * 1e4 * share, rel=1e-12)
    assert (spent.delta, spent.steps, ledger.steps, len(ledger)) == (1e-5, 3, 3, 6)


def test_other_events_alone_share_delta_among_themselves(Lump):
    assert filled(Lump(1.0), Lump(2.0)).spent(1e-5).epsilon == pytest.approx(3.0 + 1e4 * 1e-5)
    assert filled(Lump(1.0)).spent(1e-5).epsilon == 1.0 + 1e4 * 1e-5


def test_other_events_survive_json_in_order(Lump):
    ledger = filled(PLAIN, Lump(1.0), PLAIN)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert again == ledger
    assert [event.kind for event, _ in again.events] == ["step", "lump", "step"]


def test_entries_without_a_kind_are_steps():
    assert Ledger.from_dict({"events": [{"event": OTHER.to_dict(), "count": 7}]}) == filled(*[OTHER] * 7)


def test_a_kind_is_registered_once():
    with pytest.raises(InvalidArgument, match="registered already"):
        registered(StepEvent)
