"""The page of `clipless report --html`: complete, self-contained, and honest about what is not private."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from clipless.app.report import read_run
from clipless.app.report_page.facts import warnings
from clipless.app.report_page.promise import promise
from commanding import Done, run_main

VOID = {"meta", "link", "br", "img", "hr", "input"}
ACCURACY = re.compile(r"\d+\.\d\d %")


class Page(HTMLParser):
    """The elements of a page with the text in each, and a check that all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[dict[str, Any]] = []
        self.elements: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert not self.open, [one["tag"] for one in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {"tag": tag, "attributes": dict(attrs), "text": "", "inside": [one["tag"] for one in self.open]}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [one for one in self.elements if one["tag"] == tag and wanted.items() <= one["attributes"].items()]

    def rows(self) -> dict[str, str]:
        """The label of each row of a table of facts, and its value with its mark."""
        cells = [one for one in self.elements if one["tag"] == "td" or one["attributes"].get("scope") == "row"]
        return {
            one["text"]: after["text"]
            for one, after in itertools.pairwise(cells)
            if (one["tag"], after["tag"]) == ("th", "td")
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: automatic clipping, a released histogram, a fixed seed, no privacy."""
    from typer.testing import CliRunner

    from clipless.app.cli import app

    folder = tmp_path_factory.mktemp("runs")
    for name, extra in {
        "auto": [],
        "dc": ["--clipping", "dc-p"],
        "seeded": ["--clipping", "quantile", "--seed", "918273645"],
        "plain": ["--clipping", "none"],
    }.items():
        arguments = ["train", "--model", "linear", "--epochs", "2", "--accountant", "rdp", "--out", str(folder / name)]
        assert CliRunner().invoke(app, [*arguments, *extra, "--json"], catch_exceptions=False).exit_code == 0
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the runs, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture
def command(runs: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: run_main(["report", *arguments], runs, capsys)


def page_of(runs: Path, done: Done) -> Page:
    assert done.returncode in (0, 3), done.stderr
    return Page((runs / "page.html").read_text(encoding="utf-8"))


def test_the_page_says_what_is_promised(runs: Path, command: Any) -> None:
    page = page_of(runs, command("dc", "--html", "page.html"))
    text = page.all("body")[0]["text"]
    plan = json.loads((runs / "dc/run.json").read_text())["plan"]
    for words in (
        "zero-out: one record is replaced by an empty one",
        "17.82 %",
        "-differential privacy",
        "guesses right",
        "1,437",
        "digits",
    ):
        assert words in text
    rows = page.rows()
    pld, rdp = (float(re.findall(r"[\d.]+", rows[f"epsilon spent, by {name}"])[-1]) for name in ("pld", "rdp"))
    assert pld < rdp == pytest.approx(plan["epsilon"], rel=0.01)
    assert f"({rdp}, 1e-05)-differential privacy" in text
    assert json.loads((runs / "dc/run.json").read_text())["ledger_file"]["head"] in text
    assert "2.13" in rows["torch"]
    assert "(approximation" not in text


@pytest.mark.parametrize(
    ("run", "noise", "words"),
    [
        ("auto", "secure", "one would have to break that cipher"),
        ("seeded", "seeded", "it is enough to know its seed"),
        ("auto", "device", "not cryptographic: whoever predicts its numbers"),
    ],
)
def test_the_page_does_not_promise_more_than_the_noise_can_keep(runs: Path, run: str, noise: str, words: str) -> None:
    """Against unlimited computing power nothing is promised: noise that is computed from a key can be computed again."""
    reading = read_run(runs / run)
    plan = {**reading.plan, "noise": noise}
    assert reading.file is not None
    changed = replace(reading, file=replace(reading.file, plan=plan))
    (against,) = promise(changed, changed.spent())["Against whom?"]
    assert words in against[0].text
    assert "computing power" not in against[0].text
    assert any("not cryptographic" in one for one in warnings(changed)) == (noise == "device")


def test_without_privacy_no_budget_is_shown(runs: Path, command: Any) -> None:
    rows = page_of(runs, command("plain", "--html", "page.html")).rows()
    assert rows["epochs"] == "2"
    assert not {"epsilon", "delta", "accountant"} & {*rows}


def test_the_page_names_all_that_a_step_releases(runs: Path, command: Any) -> None:
    """A policy's statistic is released as well."""
    for name, told in (("dc", True), ("auto", False)):
        text = page_of(runs, command(name, "--html", "page.html")).all("body")[0]["text"]
        assert ("so is a statistic of their lengths" in text) == told
        assert "Nothing else of the batch is shown." in text


def test_the_epsilons_are_those_of_the_terminal(runs: Path, command: Any) -> None:
    page = page_of(runs, command("auto", "--html", "page.html", "--delta", "1e-6", "--accountant", "gdp"))
    for name in ("pld", "rdp", "gdp"):
        found = json.loads(command("auto", "--delta", "1e-6", "--accountant", name, "--json").stdout)["spent"][
            "epsilon"
        ]
        label = next(label for label in page.rows() if label.startswith(f"epsilon spent, by {name}"))
        assert float(re.findall(r"[\d.]+", page.rows()[label])[-1]) == pytest.approx(found, rel=1e-3)
        assert ("approximation" in label) == (name == "gdp")
    worded = json.loads(command("auto", "--delta", "1e-6", "--accountant", "pld", "--json").stdout)["spent"]["epsilon"]
    stated = re.search(r"\(([\d.]+), 1e-06\)-differential privacy", page.all("body")[0]["text"])
    assert stated
    assert float(stated[1]) == pytest.approx(worded, rel=1e-3)


def test_the_page_needs_nothing_but_itself(runs: Path, command: Any) -> None:
    page = page_of(runs, command("auto", "dc", "plain", "--html", "page.html"))
    text = (runs / "page.html").read_text(encoding="utf-8")
    assert not page.all("script")
    assert not page.all("link")
    assert not re.search(r"https?://|url\(|@import|src=", text)
    ids = {one["attributes"]["id"] for one in page.elements if "id" in one["attributes"]}
    links = [one["attributes"]["href"] for one in page.all("a")]
    assert len(links) >= 5
    assert {link[:1] for link in links} == {"#"}
    assert {link[1:] for link in links} <= ids
    assert page.all("meta", name="viewport")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_every_number_that_is_not_private_is_marked(runs: Path, command: Any) -> None:
    page = page_of(runs, command("auto", "dc", "seeded", "plain", "--html", "page.html"))
    marked = page.all("span", data_private="no")
    assert all("not private" in one["text"] for one in marked)
    texts = " ".join(one["text"] for one in marked)
    for name in ("auto", "dc", "seeded", "plain"):
        metrics = json.loads((runs / name / "run.json").read_text())["metrics"]
        shown = f"{metrics['test_accuracy']:.2%}".replace("%", " %")
        places = [one for one in page.all("td") if shown in one["text"]]
        assert len(places) >= 2
        assert all("not private" in one["text"] for one in places)
        assert f"{metrics['seconds']:.1f} s" in texts
    for figure in page.all("figure"):
        about_test = "Test accuracy" in figure["text"] or "Reliability" in figure["text"]
        about_seed = "Clipping threshold" in figure["text"]
        assert ("not private" in figure["text"]) == (about_test or about_seed)
        assert (figure["attributes"].get("data-private") == "no") == (about_test or about_seed)
    assert [one["text"] for one in page.all("td", data_run="plain")].count("no guarantee not private") == 2
    counted = [one for one in page.all("span") if one["text"].startswith("1,437")]
    assert counted
    assert all("counts as public" in one["text"] for one in counted)


def test_a_seed_is_never_shown_and_its_run_is_marked(runs: Path, command: Any) -> None:
    page = page_of(runs, command("seeded", "--html", "page.html"))
    assert "918273645" not in (runs / "page.html").read_text(encoding="utf-8")
    assert any("fixed seed" in one["text"] for one in page.all("p", class_="warning"))
    assert "not private" in page.rows()["seed"]
    assert "not private" in page.rows()["epsilon spent, by pld"]


def test_figures_show_what_was_stored(runs: Path, command: Any) -> None:
    page = page_of(runs, command("auto", "dc", "--html", "page.html"))
    titles = [one["text"].splitlines()[1] for one in page.all("figure")]
    assert [title.removesuffix(" not private") for title in titles] == [
        "Test accuracy",
        "Clipping threshold",
        "Reliability",
        "Released histogram of gradient norms: dc",
    ]
    curves = [one for one in page.all("polyline") if len(one["attributes"]["points"].split()) > 2]
    assert next(len(one["attributes"]["points"].split()) for one in curves if one["attributes"]["class"] == "s1") == 12
    for one in curves:
        numbers = [float(number) for number in re.split("[ ,]", one["attributes"]["points"])]
        assert all(0 <= x <= 360 for x in numbers[::2])
        assert all(0 <= y <= 230 for y in numbers[1::2])


def test_names_are_escaped(runs: Path, command: Any) -> None:
    evil = '<script>alert("x")</script>'
    record = json.loads((runs / "auto/run.json").read_text())
    record["data"] = record["arguments"]["model"] = evil
    record["not_private"]["metrics.test_accuracy"] = evil
    (runs / "auto/run.json").write_text(json.dumps(record))
    (runs / "auto").rename(runs / "a<b>&c")
    page = page_of(runs, command("a<b>&c", "--html", "page.html"))
    assert not page.all("script")
    assert not page.all("b")
    assert page.all("h2")[0]["text"] == "a<b>&c"


def test_a_torn_ledger_is_said_on_the_page_and_a_damaged_one_leaves_none(runs: Path, command: Any) -> None:
    ledger = runs / "dc/ledger.jsonl"
    whole = ledger.read_bytes()
    (runs / "dc/run.json").unlink()
    ledger.write_bytes(whole[:-40])
    done = command("auto", "dc", "--html", "page.html")
    assert done.returncode == 3
    assert "the ledger of dc is torn" in done.stderr
    (warning,) = page_of(runs, done).all("p", class_="warning")
    assert "counts as one more step" in warning["text"]
    (runs / "page.html").unlink()
    ledger.write_bytes(whole.replace(b'"line": 5', b'"line": 6'))
    done = command("auto", "dc", "--html", "page.html")
    assert (done.returncode, done.stdout) == (4, "")
    assert not (runs / "page.html").exists()


def test_an_unfinished_run_and_a_bare_ledger_have_pages(runs: Path, command: Any) -> None:
    shutil.move(runs / "auto/ledger.jsonl", runs / "kept.jsonl")
    page = page_of(runs, command("kept.jsonl", "--html", "page.html"))
    assert page.all("h2")[0]["text"] == "kept"
    assert not page.all("figure")
    assert "-differential privacy" in page.all("body")[0]["text"]


AUDIT = {"lower_bound": 0.71, "claimed_epsilon": 3.0, "confidence": 0.95, "failed": False, "data": "digits"}


def test_the_audit_beside_a_run_is_shown_if_it_is_about_it(runs: Path, command: Any) -> None:
    arguments = json.loads((runs / "auto/run.json").read_text())["arguments"]
    assert not any(label.startswith("audit") for label in page_of(runs, command("auto", "--html", "page.html")).rows())
    (runs / "auto/audit.json").write_text(json.dumps(AUDIT | {"arguments": arguments | {"seed": 7}}))
    rows = page_of(runs, command("auto", "--html", "page.html")).rows()
    assert "at least 0.71" in rows["audit of this configuration"]
    assert "not private" in rows["audit of this configuration"]
    (runs / "auto/audit.json").write_text(json.dumps(AUDIT | {"arguments": arguments | {"clipping": "abadi"}}))
    rows = page_of(runs, command("auto", "--html", "page.html")).rows()
    assert "another configuration (different: clipping)" in rows["audit"]
    assert "0.71" not in rows["audit"]
    (runs / "auto/audit.json").write_text("{}")
    assert command("auto", "--html", "page.html").returncode == 4


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("grid", "By training each of 2 candidates with noise"),
        ("papernot-steinke", "Epsilon covers the released run alone: the other runs, how many there were"),
    ],
)
def test_a_search_has_a_page(
    runs: Path, command: Any, capsys: pytest.CaptureFixture[str], method: str, words: str
) -> None:
    tune = [
        "tune",
        "--try",
        "lr=0.1,0.2",
        "--model",
        "linear",
        "--epochs",
        "1",
        "--method",
        method,
        "--out",
        "t",
        "--json",
    ]
    assert run_main(tune, runs, capsys).returncode == 0
    text = page_of(runs, command("t", "auto", "--html", "page.html")).all("body")[0]["text"]
    assert words in text
    assert ("but nothing of the other runs of the search" in text) == (method != "grid")


def test_the_same_runs_give_the_same_page(runs: Path, command: Any) -> None:
    first = (page_of(runs, command("auto", "dc", "--html", "page.html")), (runs / "page.html").read_bytes())
    command("auto", "dc", "--html", "page.html")
    assert (runs / "page.html").read_bytes() == first[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["auto", "--html", "auto/ledger.jsonl"], "end its name in .html"),
        (["auto", "--html", "auto/run.json/page.html"], "Choose another file"),
        (["auto", "auto", "--html", "page.html"], "a run is given twice"),
        (["auto", "dc", "--head", "0" * 64], "--head is the hash of one ledger"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(runs: Path, command: Any, arguments: list[str], message: str) -> None:
    before = (runs / "auto/ledger.jsonl").read_bytes()
    done = command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert (runs / "auto/ledger.jsonl").read_bytes() == before


def test_json_names_the_page_and_holds_every_run(runs: Path, command: Any) -> None:
    found = json.loads(command("auto", "plain", "--html", "page.html", "--json").stdout)
    assert [one["private"] for one in found["runs"]] == [True, False]
    assert found["page"] == "page.html"
    assert json.loads(command("auto", "--html", "page.html", "--json").stdout)["page"] == "page.html"
