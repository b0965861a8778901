"""The site in Chromium: a phone shows all of it, and its search finds the page that a reader wants."""

import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from selenium.webdriver.support.ui import WebDriverWait

from tests.chromium import chromium
from tests.docs.pages import DOCS

# The site is built, and each page shown: seconds, but many of them beside other suites.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("site")]

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
ROOM = {60: 17, 160: 25}
"""How many letters have room in a line of a cell that has so many, or more."""
LEAST_PX = 9.0

SEARCHED = {
    "ran twice": "ran-twice",
    "task executed twice": "ran-twice",
    "duplicate execution": "ran-twice",
    "acks_late": "ran-twice",
    "visibility timeout": "redis-broker",
    "stuck": "runbook",
    "stuck lock": "runbook",
    "troubleshooting": "runbook",
    "runbook": "runbook",
    "release a lock": "runbook",
    "grace period": "runbook",
    "kubernetes": "runbook",
    "deadlock": "faq",
    "faq": "faq",
    "redlock": "faq",
    "distributed lock": "faq",
    "debounce": "recipes",
    "newest wins": "recipes",
    "last call wins": "recipes",
    "coalesce": "recipes",
    "save as you type": "recipes",
    "throttle": "recipes",
    "rate limit": "recipes",
    "semaphore": "recipes",
    "concurrency limit": "recipes",
    "long running task": "recipes",
    "once a day": "recipes",
    "fan-out": "recipes",
    "exactly once": "failure-modes",
    "fencing token": "failure-modes",
    "celery beat": "beat",
    "overlapping periodic task": "beat",
    "django": "django",
    "on_commit": "django",
    "flask": "django",
    "pytest": "testing",
    "migrate from celery-once": "moving",
    "cache.add": "moving",
    "prometheus": "monitoring",
    "grafana dashboard": "monitoring",
    "signals": "monitoring",
    "chord": "how-it-works",
    "production checklist": "go-live",
    "install": "quickstart",
    "elasticache": "works-with",
    "sentry": "works-with",
    "benchmark": "evidence",
    "python-redis-lock": "compared",
    "lease": "options",
    "setnx_url": "settings",
    "LockLost": "api",
}
"""What people search for, and the page that must come first."""

SEEN = """
const width = arguments[0];
const says = e => e.textContent.trim().replace(/\\s+/g, " ").slice(0, 60);
const letter = document.createElement("canvas").getContext("2d");
const room = cell => {
  const style = getComputedStyle(cell);
  letter.font = style.font;
  const inside = cell.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return inside / letter.measureText("0").width;
};
const scrolls = e => getComputedStyle(e).overflowX === "auto" || getComputedStyle(e).overflowX === "scroll";
const content = document.querySelector(".content");
return {
  words: document.querySelector("article").textContent.length,
  page: Math.max(document.documentElement.scrollWidth, content.scrollWidth),
  wide: [...content.querySelectorAll("*")]
    .filter(e => e.getBoundingClientRect().right > width + 1)
    .filter(e => { const box = e.closest(".table-wrapper, pre"); return !box || !scrolls(box); })
    .map(e => e.tagName + ": " + says(e)),
  cells: [...document.querySelectorAll("article table.docutils :is(td, th)")]
    .map(cell => [cell.textContent.trim().length, room(cell), says(cell)]),
  pictures: [...document.querySelectorAll("article img")]
    .map(e => [e.getAttribute("src"), e.getBoundingClientRect().width, e.naturalWidth]),
};
"""


@dataclass(frozen=True)
class Seen:
    """A page on a phone."""

    words: int  # its length
    page: float  # how wide it is
    wide: list[str]  # what reaches beyond the screen, and does not scroll by itself
    cells: list[tuple[int, float, str]]  # of tables: letters, letters that have room in a line, how it begins
    pictures: list[tuple[str, float, float]]  # each with how wide it is shown, and how wide it is by itself


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "-b", "html", "-d", f"{built}/.trees", DOCS, built]
    subprocess.run(command, check=True)
    return built


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One for all tests."""
    started = chromium(tmp_path_factory.mktemp("chromium"))
    try:
        started.set_page_load_timeout(300)
        yield started
    finally:
        started.quit()


@pytest.fixture(scope="module")
def on_a_phone(site, browser):
    """Every page, by its name."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    seen = {}
    for page in sorted(site.glob("*.html")):
        browser.get(page.as_uri())
        seen[page.stem] = Seen(**browser.execute_script(SEEN, PHONE["width"]))
    return seen


def test_every_page_is_on_the_site(on_a_phone):
    """With its words: what nobody sees is not too wide either."""
    assert {path.stem for path in DOCS.glob("*.md")} <= set(on_a_phone)
    assert [name for name, page in on_a_phone.items() if not page.words and name != "search"] == []


def test_no_page_is_wider_than_a_phone(on_a_phone):
    """What is wider, a table or a block of code, scrolls by itself."""
    assert {name: page.page for name, page in on_a_phone.items() if page.page > PHONE["width"]} == {}
    assert {name: page.wide for name, page in on_a_phone.items() if page.wide} == {}


def test_no_long_cell_of_a_table_is_narrow_on_a_phone(on_a_phone):
    """The more words a cell has, the more of them stand in a line: no row is forty lines deep."""
    assert sum(len(page.cells) for page in on_a_phone.values()) > 1000
    narrow = [
        (name, says, round(room))
        for name, page in on_a_phone.items()
        for letters, room, says in page.cells
        if room < max((least for length, least in ROOM.items() if letters >= length), default=0)
    ]
    assert narrow == []


def test_letters_of_pictures_can_be_read_on_a_phone(on_a_phone, site):
    """As wide as they are shown there, none is smaller than nine pixels; what has only pixels keeps half."""
    pictures = [picture for page in on_a_phone.values() for picture in page.pictures]
    drawn = [picture for picture in pictures if picture[0].startswith("_images/")]
    assert len(drawn) > 5
    for source, width, by_itself in drawn:
        if not source.endswith(".svg"):
            assert width >= by_itself / 2, source
            continue
        text = (site / source).read_text()
        whole = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
        sizes = [float(size) for size in re.findall(r'font-size(?:="|: )([\d.]+)', text)]
        assert sizes, source
        assert min(sizes) * width / whole >= LEAST_PX, source


class Anchors(HTMLParser):
    """Of a page: where its links lead, and what can be led to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        of = dict(attrs)
        self.names |= {of[name] for name in ("id", "name") if of.get(name)}
        self.links += [of[name] for name in ("href", "src") if of.get(name)]


def test_links_inside_the_site_lead_somewhere(site):
    """To a file of the site, and where they name one, to a place on its page."""
    pages = {path: Anchors(path) for path in site.glob("*.html")}
    dead, followed = [], 0
    for page, its in pages.items():
        for link in its.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            there = pages.get(target)
            followed += 1
            if not target.is_file() or (there and url.fragment and unquote(url.fragment) not in there.names):
                dead.append(f"{page.name}: {link}")
    assert followed > 1000
    assert dead == []


@pytest.fixture(scope="module")
def first_found(site, browser):
    """The page that the search names first, by what is searched for; "" if it finds none."""
    found = {}
    for phrase in SEARCHED:
        browser.get(f"{(site / 'search.html').as_uri()}?q={quote(phrase)}")
        WebDriverWait(browser, 300).until(
            lambda its: "earch" in its.find_element("class name", "search-summary").text
        )
        first = browser.find_elements("css selector", "#search-results li a")[:1]
        found[phrase] = "".join(Path(urlsplit(link.get_attribute("href")).path).stem for link in first)
    return found


@pytest.mark.parametrize("phrase", SEARCHED)
def test_search_names_the_right_page_first(phrase, first_found):
    """In the words that people use."""
    assert first_found[phrase] == SEARCHED[phrase]
