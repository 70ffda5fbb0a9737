"""The page on a run: whole, self-contained, and with the run's figures."""

import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from deepspeed_mcrdl import cli
from deepspeed_mcrdl.observe.files import path_of
from deepspeed_mcrdl.observe.page import _round_steps, content
from tests.observe.programs import everything

SECTIONS = ["steps", "operations", "sizes", "latencies", "routes", "ranks", "timeline"]
VOID = {"meta", "br", "rect", "line", "polygon", "polyline"}


class Page(HTMLParser):
    """Collects what the tests ask for, and sees that every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.outside, self.words, self.rectangles = [], [], [], [], 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.outside += [value for name, value in given.items() if name in ("src", "href")]
        self.outside += [tag] if tag in ("script", "link", "iframe") else []
        if tag == "section":
            self.sections.append(given["id"])
        self.rectangles += tag == "rect"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """Return the folder of a run of two ranks, with its page."""
    folder = tmp_path_factory.mktemp("run")
    ranks(2).run(everything, str(folder))
    assert cli.main(["report", "run", str(folder)]) == 0
    return folder


def test_the_page_is_whole_and_needs_nothing_else(run):
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.sections == SECTIONS
    assert page.outside == []
    assert "url(" not in text
    assert "nan" not in text
    assert page.rectangles > 30


def test_its_figures_are_those_of_the_run(run):
    shown = content(run)
    tiles = {what: (figure, unit) for figure, unit, what in shown["tiles"]}
    assert tiles["calls of a rank"][0] == str(3 * 21)
    assert "median of 20 steps" in tiles
    assert tiles["throughput of all ranks"][1] == "samples/s"
    assert {(row["operation"], row["backend"], row["why"]) for row in shown["routes"]} == {
        ("all_reduce", "mpi", "routing.default"),
        ("all_to_all_single", "mpi", "routing.default"),
        ("broadcast", "gloo", "routing.broadcast"),
    }
    assert {row["operation"]: row["calls"] for row in shown["latencies"]} == {
        "all_reduce": "21",
        "all_to_all_single": "21",
        "broadcast": "21",
    }
    assert [name for _, name, _, _ in shown["by_rank"]["labels"]] == ["rank 0", "rank 1"]
    assert sorted(name for _, name in shown["timeline"]["names"]) == [
        f"rank {rank}, {backend}" for rank in (0, 1) for backend in ("gloo", "mpi")
    ]
    assert {row["operation"] for row in shown["late"]} >= {"all_reduce", "broadcast", "all_to_all_single"}


def test_a_run_that_was_killed_has_a_page_too(run, tmp_path, capsys):
    for rank in (0, 1):
        whole = path_of(run, "log", rank).read_text()
        path_of(tmp_path, "log", rank).write_text(whole[: int(len(whole) * 0.6)])
    assert cli.main(["report", "run", str(tmp_path), "--output", str(tmp_path / "x.html")]) == 0
    assert Page((tmp_path / "x.html").read_text()).sections == SECTIONS[:-1]  # there are no traces


def test_without_files_or_with_other_words_it_is_a_sentence(tmp_path, capsys):
    assert cli.main(["report", "run", str(tmp_path)]) == 2
    assert "there is no file log.RANK.jsonl" in capsys.readouterr().err
    assert cli.main(["report", "walk", str(tmp_path)]) == 2
    assert "`mcrdl report run DIR` makes a page" in capsys.readouterr().err


@pytest.mark.parametrize("top", [0.003, 0.7, 1, 7, 33, 250, 9999])
def test_the_marks_of_a_scale_are_few_and_within_it(top):
    marks = list(_round_steps(top))
    assert marks[0] == 0
    assert marks[-1] <= top
    assert 2 <= len(marks) <= 7


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
def test_a_browser_shows_it(run, tmp_path):
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    options += ["--no-first-run", "--disable-component-update", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        ["chromium", *options, "--dump-dom", (run / "report.html").as_uri()], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0
    page = Page(shown.stdout)
    assert page.sections == SECTIONS
    assert page.rectangles == Page((run / "report.html").read_text()).rectangles
