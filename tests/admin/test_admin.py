"""The page "Locks" in Django's admin: what staff see, who may release, and what a release does."""

import pytest

from celery_setnx import SetnxLock

pytestmark = pytest.mark.timeout(600)  # a browser, a worker and a web server start before the first

LOCKS = "/admin/setnx_locks/lock/"
SETTLE = "orders.tasks.settle(name='ann')"
MODEL = "//tr[contains(@class, 'model-lock')]//a[.='Locks']"
EVIL = "<script>document.title = 'taken'</script>"


def row(text: str) -> str:
    """The row of the table that has this text in it."""
    return f"//table[contains(@class, 'locks')]/tbody/tr[contains(., {text!r})]"


def test_staff_sees_who_has_a_lock_and_who_waits_and_releases_it(browser, shop, web):
    """After a confirmation. The body that had it runs on, the first in line runs; both logs say by whom."""
    first = shop.call("settle", "ann")
    key = shop.held(first).key
    second = shop.call("settle", "ann")
    holder = shop.held(first, waiting=1).holder
    browser.log_in("ada")
    browser.click(MODEL)
    line = browser.text(row(key))
    for said in (SETTLE, "running", first.id, holder.info["worker"]):
        assert said in line
    browser.click(row(key) + f'//a[.="{SETTLE}"]')
    assert second.id in browser.text("//table[contains(@class, 'line')]")
    assert browser.count("//table[contains(@class, 'entries')]") == 0

    browser.click("//a[.='Release']")
    browser.wait_for("//input[@value='Yes, release it']")
    assert "It runs on without its lock, and another call may run at the same time." in browser.text()
    assert shop.held(first, waiting=1).holder.fence == holder.fence
    assert shop.entries() == []
    browser.click("//input[@value='Yes, release it']")
    assert browser.text("//*[@class='success']") == f"Released {key}."
    shop.held(second)
    assert not first.ready()
    ((user, of, what),) = shop.entries()
    assert (user, of) == ("ada", key)
    assert first.id in what
    browser.go(LOCKS)
    browser.click(row(key) + f'//a[.="{SETTLE}"]')
    assert first.id in browser.text("//table[contains(@class, 'entries')]")
    assert f"{key} was released by hand, by ada in the admin. It was held by" in web.log_text()
    assert (shop.end(second), shop.end(first)) == ("ann", "ann")


def test_user_without_the_permission_sees_no_button_and_may_not_post(browser, shop):
    """Nor is the confirmation shown. Who may not even see locks has no page."""
    call = shop.call("settle", "bob")
    key = shop.held(call).key
    browser.log_in("ada")
    browser.go(LOCKS)
    url = browser.url_of(row(key) + "//a[.='Release']")
    assert browser.status("POST", url, with_token=False) == 403
    assert browser.status("GET", url) == 200
    browser.log_in("bob")
    browser.go(LOCKS)
    assert call.id in browser.text(row(key))
    assert browser.count("//a[.='Release']") == 0
    assert browser.status("GET", url) == 403
    assert browser.status("POST", url) == 403
    browser.log_in("cleo")
    assert browser.count(MODEL) == 0
    assert browser.status("GET", LOCKS) == 403
    assert shop.held(call).holder.task_id == call.id


def test_release_of_what_was_shown_does_nothing_to_the_next_holder(browser, shop):
    """The confirmation is about one holder: another has the lock when it is given."""
    before = shop.entries()
    first = shop.call("settle", "cleo")
    key = shop.held(first).key
    browser.log_in("ada")
    browser.go(LOCKS)
    browser.click(row(key) + "//a[.='Release']")
    browser.wait_for("//input[@value='Yes, release it']")
    second = shop.call("settle", "cleo")
    shop.held(first, waiting=1)
    shop.end(first)
    shop.held(second)
    browser.click("//input[@value='Yes, release it']")
    assert "is free, or another's, by now" in browser.text("//*[@class='warning']")
    assert shop.held(second).holder.task_id == second.id
    assert shop.entries() == before


def test_what_a_key_and_a_holder_say_is_shown_as_text(browser, shop):
    """On all three pages."""
    key = f"shop:{{{EVIL}}}"
    info = {"task": EVIL, "task_id": EVIL, "worker": EVIL}
    held = SetnxLock(shop.redis, key, lease=600, info=info).acquire().lock
    browser.log_in("ada")
    browser.go(LOCKS)
    pages = (
        (None, "//h1[.='Locks']"),
        (f"//a[contains(., {'document.title'!r})]", "//h2[.='Who waits in line']"),
        ("//a[.='Release']", "//input[@value='Yes, release it']"),
    )
    for link, there in pages:
        if link:
            browser.click(link)
        browser.wait_for(there)
        assert browser.text(row("document.title")).count(EVIL) == 4
        assert browser.driver.title != "taken"
    browser.click("//input[@value='Yes, release it']")
    assert browser.text("//*[@class='success']") == f"Released {key}."
    assert held.release() == "lost"


def test_page_says_that_redis_does_not_answer(browser, lost_web):
    """It does not say that there are no locks."""
    browser.log_in("bob")
    browser.go(LOCKS, lost_web)
    assert "Redis does not serve the lock shop:{*} now: " in browser.text("//*[@class='error']")
    assert "Nobody has a lock" not in browser.text()
