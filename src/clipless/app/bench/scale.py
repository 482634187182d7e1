"""A cost model of a private step on many devices: compute, bytes sent and memory of each, fitted to what was measured here.

What it is fitted to: the time of private over plain training (bench*.json), and, where several processes were measured
(processes.json), what sending took. Everything else is counted, or assumed and shown on the page.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipless.app.bench.processes import PAIRS_IN_ONE, PRIVATE
from clipless.app.bench.ways import PLAIN
from clipless.errors import InvalidArgument

START, END = "<!-- scale -->", "<!-- end of scale -->"
NUMBER = 4  # bytes of a float32
FORMS = ("data parallel", "sharded")


@dataclass(frozen=True)
class Devices:
    """What is assumed of the devices: operations a second that training reaches, bytes a second that each sends, and
    nanoseconds for a number of noise."""

    count: int
    rate: float
    link: float
    noise_ns: float


@dataclass(frozen=True)
class Workload:
    """A model and its batch. `trained` are the numbers that are trained; `blocks` are gathered one at a time; the largest
    parameter is a third of a block."""

    name: str
    parameters: float
    trained: float
    blocks: int = 32
    tokens: int = 2**20


DEVICES = (Devices(8, 1.5e14, 2e11, 0.1), Devices(1024, 1.5e14, 2e10, 0.1))
SIZES = (("100 M", 1e8), ("1 B", 1e9), ("10 B", 1e10))
WORKLOADS = tuple(
    Workload(f"{name}, {kind}", size, size * share)
    for name, size in SIZES
    for kind, share in (("full", 1.0), ("LoRA", 0.003))
)


def state_bytes(workload: Workload, devices: int, form: str) -> float:
    """Parameters, released gradient, two moments of Adam and the clipped sum that one device holds; of a sharded model also
    the gathered block, and the whole sum of one parameter.

    >>> state_bytes(Workload("", 1e9, 1e9), 8, "data parallel") / 1e9
    20.0
    """
    held = NUMBER * (workload.parameters + 4 * workload.trained)
    if form == FORMS[0]:
        return held
    return held / devices + NUMBER * (workload.parameters + workload.trained / 3) / workload.blocks


def checked_bytes(workload: Workload, devices: int, form: str) -> float:
    """The same in a step that checks itself: a copy of the parameters and two unclipped sums besides. A sharded model is
    gathered for that."""
    extra = NUMBER * (workload.parameters + 2 * workload.trained)
    if form == FORMS[0]:
        return state_bytes(workload, devices, form) + extra
    return state_bytes(workload, devices, form) + extra / devices + NUMBER * workload.parameters


def sent_bytes(workload: Workload, devices: int, form: str) -> float:
    """What one device sends in a step of one part: a ring's all-reduce of the sums; or two all-gathers of the parameters and
    one reduce-scatter of the sums.

    >>> round(sent_bytes(Workload("", 1e9, 1e9), 8, "sharded") / sent_bytes(Workload("", 1e9, 1e9), 8, "data parallel"), 2)
    1.5
    """
    around = (devices - 1) / devices * NUMBER
    return around * (2 * workload.trained if form == FORMS[0] else 2 * workload.parameters + workload.trained)


def seconds(workload: Workload, devices: Devices, form: str, over_plain: float) -> tuple[float, float, float]:
    """Computing, sending and drawing noise, none of them at the same time."""
    passes = 6 if workload.trained == workload.parameters else 4  # a LoRA has no gradient of the frozen weights
    computing = over_plain * passes * workload.parameters * workload.tokens / (devices.rate * devices.count)
    drawn = workload.trained if form == FORMS[0] else workload.trained / devices.count
    return computing, sent_bytes(workload, devices.count, form) / devices.link, drawn * devices.noise_ns * 1e-9


@dataclass(frozen=True)
class Fit:
    """Time over plain training, of the encoder and its LoRA, in one process; and, if several were measured, the bytes a
    second that went over the link and the fixed milliseconds of a step."""

    full: float
    lora: float
    link: float | None = None
    fixed_ms: float | None = None


def fitted(folder: Path) -> Fit:
    """The constants, from all results stored in a folder."""
    ratios: dict[str, list[float]] = {"encoder": [], "lora": []}
    for path in sorted(folder.rglob("bench*.json")):
        models = json.loads(path.read_text(encoding="utf-8"))["models"]
        for name, found in ratios.items():
            ways = models.get(name, {}).get("ways", {})
            if PLAIN in ways and PRIVATE in ways:
                found.append(ways[PRIVATE]["figures"]["min_ms"] / ways[PLAIN]["figures"]["min_ms"])
    if not all(ratios.values()):
        raise InvalidArgument(
            f"{folder} has no bench*.json of the encoder and its LoRA: run clipless bench --out first."
        )
    full, lora = (float(np.exp(np.log(found).mean())) for found in ratios.values())
    files = sorted(folder.rglob("processes.json"))
    several = [model for path in files for model in json.loads(path.read_text(encoding="utf-8"))["models"]]
    return Fit(full, lora, *_sending(several))


def _sending(models: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Least squares of what a step of several processes takes over its share of one process's, by the bytes it sends."""
    bytes_sent, over = [], []
    for model in models:
        processes, size = model["several"]["processes"], float(model["parameters"])
        for way, alone in PAIRS_IN_ONE.items():
            if way in model["several"]["min_ms"]:
                form = FORMS["sharded" in way]
                bytes_sent.append(sent_bytes(Workload("", size, size), processes, form))
                over.append(model["several"]["min_ms"][way] - model["one"]["min_ms"][alone] / processes)
    if len(over) < 2:
        return None, None
    slope, fixed = np.polyfit(bytes_sent, over, 1)
    return (float(1e3 / slope) if slope > 0 else None), float(fixed)


def table(fit: Fit) -> str:
    """The page's tables, in Markdown."""
    measured = (
        f"Measured here: a private step of the encoder takes {fit.full:.2f} times as long as a plain one, of its LoRA "
        f"{fit.lora:.2f} times"
    )
    if fit.link is not None:
        measured += (
            f"; between processes of one machine {fit.link / 1e9:.2g} GB/s, and {fit.fixed_ms:.3g} ms for every step"
        )
    lines = [f"{measured}.", ""]
    for devices in DEVICES:
        lines += [
            f"**{devices.count:,} devices** that compute at {devices.rate / 1e12:.0f} TFLOP/s and send "
            f"{devices.link / 1e9:.0f} GB/s each:",
            "",
            "| model | form | GB held | GB, checked step | GB sent | s computing | s sending | s noise |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for workload in WORKLOADS:
            for form in FORMS:
                gigabytes = [f(workload, devices.count, form) / 1e9 for f in (state_bytes, checked_bytes, sent_bytes)]
                times = seconds(
                    workload, devices, form, fit.full if workload.trained == workload.parameters else fit.lora
                )
                figures = " | ".join(f"{value:.3g}" for value in (*gigabytes, *times))
                lines.append(f"| {workload.name} | {form} | {figures} |")
        lines.append("")
    return "\n".join(lines)
