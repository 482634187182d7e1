"""Writes docs/models.md, or the file that is named, from the registry of rules, the list of refusals and models that are
run: `make models-page`."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import clipless
from clipless.gradients.capture.refusals import REFUSALS
from clipless.gradients.layers import generic
from clipless.gradients.layers.rule import NAMED, REGISTRY, LayerRule

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
ZOO = Path(__file__).parents[1] / "benchmarks" / "results" / "zoo.json"
# Why a model that keeps its records apart, or seems to, is refused all the same, by how its name begins.
JUSTIFIED = {
    "IBert": "its buffers hold the range of the activations, learned from the records without noise",
    "Timesformer": "it takes a record's class token from a row with the frames of another, so that a row belongs to two",
}
VERDICTS = ("exact", "refused", "mixes", "wrong", "crash", "slow")
RECORDS, POSITIONS, WIDTH, CLASSES = 5, 3, 4, 3


class Body(nn.Module):
    """Something between [b,t,d] and the logits, with a parameter that is in no layer."""

    def __init__(self, shape: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(shape))
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Scale(Body):
    def body(self, x: Tensor) -> Tensor:
        return x * self.own


class ClassToken(Body):
    def body(self, x: Tensor) -> Tensor:
        return torch.cat([self.own.expand(len(x), 1, WIDTH), x], 1)


class Positions(Body):
    def __init__(self) -> None:
        super().__init__((1, POSITIONS, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return x + self.own


class LowRank(Body):
    def __init__(self) -> None:
        super().__init__((WIDTH, 2))
        self.up = nn.Parameter(torch.rand(2, WIDTH))
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.own @ self.up


class Branching(Body):
    def body(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.own if float(row.sum()) > 0 else row - self.own for row in x])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))


def headed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))


FALLBACKS: dict[str, Callable[[], nn.Module]] = {
    "A scale or gate: a parameter that multiplies the records": Scale,
    "A class token": ClassToken,
    "Learned positions": Positions,
    "LoRA factors beside a frozen layer": LowRank,
    "A forward that branches on the data": Branching,
    "A parametrised layer (`weight_norm`)": lambda: headed(weight_norm(nn.Linear(WIDTH, WIDTH))),
    "`MultiheadAttention`": Attention,
    "`TransformerEncoderLayer`": lambda: headed(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)),
}


class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(POSITIONS * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x.flatten(1)), self.head.weight)


class Tracking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(POSITIONS * WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(), 0.1)
        return self.head(x.flatten(1))


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.flatten(0, 1)).view_as(x).flatten(1))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(POSITIONS * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x.flatten(1))
        return out - out.mean(0)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(1).max(1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (here,) = torch.where(chosen == number)
            out = out.index_add(0, here, expert(rows[here]) * weight[here, None])
        return self.head(out.view_as(x).flatten(1))


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x.flatten(0, 1))
        return self.head((rows + rows.roll(1, 0)).view_as(x).flatten(1))


FALLBACKS |= {
    "A parameter that is used outside its module's forward": Borrowed,
    "Records that are flattened together with positions": Merged,
    "Rows that are sent to experts": Experts,
}
FOUND_OUT: dict[str, Callable[[], nn.Module]] = {
    "A buffer that learns from the records": Tracking,
    "Rows of flattened records that meet their neighbours": Neighbours,
    "A model or a loss in which records meet (found by `clipless.check`)": Centred,
}


def page() -> str:
    """The whole page, as it should be in docs/models.md."""
    return "\n".join(
        [
            "# Which models are covered",
            "",
            "Any `nn.Module`, as it is, or a refusal that says what to do. This page is written by `make models-page` from",
            "the registry of rules, the list of refusals and models that are run, and a test fails when it is out of date.",
            "`clipless.check(model, loss_fn, batch)` and `clipless check --model package.module:factory` say the same of a",
            "model of your own, parameter by parameter.",
            "",
            "## Exact, by a rule of their own",
            "",
            "Per-record norms and the clipped sum come from the layer's input and the gradient of its output. A subclass",
            "that keeps the `forward` of its class is covered by the same rule. Models of these layers may tie weights, use",
            "a layer several times, freeze parameters or leave them unused.",
            "",
            *table(("Layers", "Rule", "Notes"), exact()),
            "",
            "## Exact, by a fallback",
            "",
            "Slower than a rule where gradients per record are written out. The models in the table were compared with the",
            "loop over single records when the page was written.",
            "",
            "- **rows**: rows that are not the records: positions flattened together with them, windows, choices, rows sent",
            "  to experts, one call per record. Backward passes whose losses are multiplied by powers of two, each record's",
            "  by its own, tell in every step which record each row belongs to. A row that belongs to several is refused.",
            "  Such models take one more backward pass per step for up to 32 records, two for up to 1,024; give",
            "  `private.backward` one loss per record.",
            "- **by operation**: a parameter that is in no known layer is followed to the operations in which it meets the",
            "  records, and these are differentiated record by record; products and convolutions by their layers' rules,",
            "  also with weights that are standardised or normalised first.",
            f"- **generic**: the module is run again, one record at a time. {note(generic)}",
            "",
            *table(("Model", "Parameters and how they are handled"), fallbacks()),
            "",
            "## Refused, by the kind of module",
            "",
            *table(("Module", "Why", "Remedy"), refused()),
            "",
            "## Refused once detected",
            "",
            *table(("What", "Message"), found_out()),
            "",
            *zoo(),
        ]
    )


def exact() -> list[tuple[str, ...]]:
    """One row per rule, in the order of registration."""
    layers: dict[LayerRule, list[str]] = {}
    for kind, rule in REGISTRY.items():
        layers.setdefault(rule, []).append(f"`{kind.__name__}`")
    for path, rule in NAMED.items():
        layers.setdefault(rule, []).append(f"`{path}`")
    rows = [(", ".join(names), rule.__name__.replace("_", " "), note(rule)) for rule, names in layers.items()]
    return sorted(rows, key=lambda row: row[0].lower())


def note(rule: LayerRule) -> str:
    """The first paragraph that was written about a rule, or else about the file it is in."""
    text = inspect.getdoc(rule) or inspect.getdoc(sys.modules[rule.__module__]) or ""
    return " ".join(text.split("\n\n")[0].split())


def fallbacks() -> list[tuple[str, str]]:
    """How the parameters of each model are handled, which is checked against the oracle here and now."""
    rows = []
    for what, make in FALLBACKS.items():
        report = clipless.check(built(make), losses, batch())
        report.raise_if_unsound()
        how: dict[str, list[str]] = {}
        for row in report.handling:
            how.setdefault(row.how, []).append(f"`{row.parameter}`")
        rows.append((what, "; ".join(f"{key}: {', '.join(names)}" for key, names in how.items())))
    return rows


def refused() -> list[tuple[str, str, str]]:
    return [(r.what, f"It {r.why}.", f"{r.remedy}.") for r in REFUSALS]


def found_out() -> list[tuple[str, str]]:
    """The message that a user sees for each of the models; measured numbers are left out."""
    rows = []
    for what, make in FOUND_OUT.items():
        report = clipless.check(built(make), losses, batch())
        if report.sound:
            raise AssertionError(f"{what}: expected a refusal.")
        rows.append((what, re.sub(r"(?<=by )[\d.]+(e[+-]\d+)?", "…", report.problems[0])))
    return rows


def zoo() -> list[str]:
    """What `make zoo` found, by family."""
    if not ZOO.exists():
        return []
    found = json.loads(ZOO.read_text(encoding="utf-8"))
    cases = [case for case in found["cases"] if case["verdict"] != "unbuilt"]
    rows = []
    for family in dict.fromkeys(case["family"] for case in cases):
        here = [case["verdict"] for case in cases if case["family"] == family]
        rows.append((family, *(str(here.count(kind)) for kind in VERDICTS)))
    rows.append(("all", *(str([case["verdict"] for case in cases].count(kind)) for kind in VERDICTS)))
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case["verdict"] not in ("exact", "mixes"):
            why = re.sub(r"\(\(.*?\)\)", "(…)", re.sub(r"'[^']*'", "…", case["why"])).split(". ")[0].split(": ")[0]
            reasons.setdefault(f"{case['verdict']}: {why}", []).append(f"`{case['name']}`")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        "## Models from other packages",
        "",
        "Tiny configurations of every architecture in transformers' task mappings, torch's own samples of its modules and",
        "models of other packages, with BatchNorm replaced and without dropout, each compared with single records by",
        f"`make zoo` ({versions}). *Mixes* are models whose gradient on a batch is indeed not the sum over its records.",
        "",
        *table(("Family", *(kind.capitalize() for kind in VERDICTS)), rows),
        "",
        *table(
            ("What is not exact", "Models", "Because"),
            [(why, ", ".join(names), justified(names)) for why, names in reasons.items()],
        ),
        "",
    ]


def justified(names: list[str]) -> str:
    """Why models of these names stay refused."""
    found = {why for name in names for begin, why in JUSTIFIED.items() if name.startswith(f"`{begin}")}
    return "; ".join(sorted(found))


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        model(batch()[0])
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, POSITIONS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (RECORDS,), generator=generator)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    Path(*sys.argv[1:] or [PAGE]).write_text(page(), encoding="utf-8")
