"""Draws the picture of docs/django.md: python -m tests.admin.picture docs/locks-admin.png [DIRECTORY].

The directory gets the other pages too, as a desktop and a phone show them.
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from PIL import Image

from examples.embedded import EmbeddedServer
from tests.admin.shop import Browser, Shop, WebServer
from tests.admin.test_admin import LOCKS
from tests.harness import Worker

WIDTH, SCALE = 470, 1.5  # in CSS pixels: its letters can be read on a phone, and it is sharp
COLORS = 48
SIZES = {"desktop": 1280, "phone": 390}


def draw(picture: str, directory: str = "") -> None:
    """Start all that is shown, and save what the browser shows of it."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shop = Shop(server.url(), home)
        options = {"concurrency": 6, "environment": shop.environment, "arguments": ("-n", "w1@shop")}
        stack.callback(Worker(home, "shop", queues=shop.queue, **options).kill)
        web = WebServer(shop)
        stack.callback(web.kill)
        play(shop)
        stack.callback(shop.end_all)
        browser = Browser(web, home / "profile")
        stack.callback(browser.driver.quit)
        browser.log_in("ada")
        browser.go(LOCKS)
        browser.save(Path(picture), WIDTH, SCALE)
        with Image.open(picture) as image:
            image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(picture, optimize=True)
        if directory:
            for name, path in pages(browser).items():
                browser.go(path)
                for size, width in SIZES.items():
                    browser.save(Path(directory, f"{name}-{size}.png"), width)


def play(shop: Shop) -> None:
    """An account is settled, with two calls in line; two fetch a bank's rates, and a third waits."""
    first = shop.call("settle", "ann")
    shop.held(first)
    for count in (1, 2):
        shop.call("settle", "ann")
        shop.held(first, waiting=count)
    two = [shop.call("fetch_rates", "ecb") for _ in range(2)]
    for call in two:
        shop.held(call)
    shop.call("fetch_rates", "ecb")
    shop.held(two[0], waiting=1)


def pages(browser: Browser) -> dict[str, str]:
    """The pages, by name."""
    line = "//tr[td[@data-label='Waiting' and .='2']]"
    lock, release = (browser.url_of(f"{line}//a[{place}]") for place in (1, "@class='button'"))
    return {"locks": LOCKS, "lock": lock, "release": release}


if __name__ == "__main__":
    draw(*sys.argv[1:])
