"""Privacy: the same run as from make_private's own arguments, checked early, and read from configuration files."""

import dataclasses
import inspect
import tomllib
from typing import Any

import pytest
import torch
from torch import nn

import clipless
import small_run
from clipless.clipping import CLIPPINGS


def test_the_record_has_the_privacy_arguments_of_make_private_with_its_defaults() -> None:
    ours = {item.name: item.default for item in dataclasses.fields(clipless.Privacy)}
    of_make_private = inspect.signature(clipless.make_private).parameters
    assert all(of_make_private[name].default == value for name, value in ours.items())
    rest = {name for name, parameter in of_make_private.items() if parameter.kind == parameter.KEYWORD_ONLY} - set(ours)
    assert rest == {
        "batch_size", "epochs", "steps", "micro_batch", "memory", "loss_reduction", "unit_gradients", "kernels", "check",
        "group",
    }  # fmt: skip


def test_it_makes_the_same_run() -> None:
    privacy = clipless.Privacy(noise_multiplier=1.3, delta=1e-5, clipping=clipless.dc_p(), accountant="rdp", seed=3)
    ends = []
    for given in (privacy.arguments(), {"clipping": clipless.dc_p(), "seed": 3, "noise_multiplier": 1.3}):
        torch.manual_seed(0)
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = small_run.dataset()
        options = {"delta": 1e-5, "accountant": "rdp", **given, "batch_size": 12, "steps": 3}
        private = clipless.make_private(model, optimizer, data, **options)
        for x, y in private.loader:
            private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
        ends.append((model.weight.detach().clone(), private.plan.to_dict(), private.spent()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "give epsilon="),
    ({"epsilon": 3.0, "noise_multiplier": 1.0}, "contradict"),
    ({"epsilon": 0.0}, "above 0"),
    ({"epsilon": "3"}, "must be a number"),
    ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
    ({"epsilon": 3.0, "delta": 1.0}, "delta must lie"),
    ({"epsilon": 3.0, "clipping": "auto-x"}, "unknown clipping"),
    ({"epsilon": 3.0, "clipping": None}, "clipping must be a name"),
    ({"epsilon": 3.0, "accountant": "prv"}, "unknown accountant"),
    ({"epsilon": 3.0, "noise": "secure", "seed": 1}, "takes no seed"),
    ({"epsilon": 3.0, "noise": "seeded"}, "needs seed="),
    ({"epsilon": 3.0, "allow_overspend": "yes"}, "True or False"),
    ({"epsilon": 3.0, "gradients": "ghost"}, "unknown gradients"),
    ({"epsilon": 3.0, "projections": 0}, "projections must be at least 1"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_wrong_values_are_refused_when_the_record_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(clipless.CliplessError, match=message):
        clipless.Privacy(**given)
    with pytest.raises(clipless.CliplessError, match=message):
        clipless.Privacy.from_dict(given)


def test_nothing_of_it_changes_and_the_seed_is_not_shown() -> None:
    privacy = clipless.Privacy(epsilon=3.0, seed=123456)
    with pytest.raises(dataclasses.FrozenInstanceError):
        privacy.epsilon = 8.0  # type: ignore[misc]
    assert "123456" not in repr(privacy)
    assert dataclasses.replace(privacy, epsilon=8.0).arguments()["seed"] == 123456
    assert privacy == clipless.Privacy(epsilon=3.0, seed=123456) != clipless.Privacy(epsilon=3.0)


def test_a_configuration_file_gives_the_same_record() -> None:
    text = """
    [privacy]
    epsilon = 8
    delta = 1e-6
    accountant = "rdp"
    clipping = { name = "quantile", percentile = 0.7, rule = "auto-s", groups = [["0.*"], ["1.*"]] }
    """
    clipping = clipless.quantile(percentile=0.7, rule="auto-s", groups=[["0.*"], ["1.*"]])
    expected = clipless.Privacy(epsilon=8, delta=1e-6, accountant="rdp", clipping=clipping)
    assert clipless.Privacy.from_dict(tomllib.loads(text)["privacy"]) == expected


@pytest.mark.parametrize("name", CLIPPINGS)
def test_every_clipping_is_read_by_name_and_from_a_table(name: str) -> None:
    plain = clipless.Privacy.from_dict({"epsilon": 1.0, "clipping": name})
    table = clipless.Privacy.from_dict({"epsilon": 1.0, "clipping": {"name": name, "groups": "per-layer"}})
    assert plain.clipping == name
    assert table.clipping == dataclasses.replace(CLIPPINGS[name](), groups="per-layer")


STRANGE: list[tuple[Any, str]] = [
    (["epsilon"], "takes a mapping"),
    ({"epsilon": 3.0, "max_grad_norm": 1.0}, "clipping="),
    ({"epsilon": 3.0, "batch_size": 64}, "beside it"),
    ({"epsilonn": 3.0}, "did you mean 'epsilon'"),
    ({"epsilon": 3.0, "clipping": {"percentile": 0.5}}, "needs its name"),
    ({"epsilon": 3.0, "clipping": {"name": "dc-p", "percentil": 0.5}}, "did you mean 'percentile'"),
    ({"epsilon": 3.0, "clipping": {"name": "dcp"}}, "did you mean 'dc-p'"),
    ({"epsilon": 3.0, "clipping": ["abadi", "global"]}, "share of the steps"),
    ({"epsilon": 3.0, "clipping": [{"share": 0.5, "name": "abadi"}]}, "add up to 1"),
]


@pytest.mark.parametrize(("config", "message"), STRANGE, ids=[str(config) for config, _ in STRANGE])
def test_a_configuration_that_says_something_else_is_refused(config: Any, message: str) -> None:
    with pytest.raises(clipless.CliplessError, match=message):
        clipless.Privacy.from_dict(config)
