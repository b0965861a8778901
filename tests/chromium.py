"""A Chromium without a screen, of Debian's packages."""

import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage
"""


def chromium(profile: Path) -> webdriver.Chrome:
    """One with an empty profile, in this directory."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program, "needs Debian's chromium"
    assert driver, "needs Debian's chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(driver))
