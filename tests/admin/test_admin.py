"""The page "Locks" in Django's admin: what staff see, who may release and pause, and what that does."""

import pytest
from django.contrib.admin.utils import quote

from celery_setnx import SetnxLock, byhand
from celery_setnx.lock.live import LiveTerm
from celery_setnx.terms import NewTerm, Whose, end_term, live_terms, set_term
from tests.harness import wait_until

pytestmark = pytest.mark.timeout(600)  # a browser, a worker and a web server start before the first

LOCKS = "/admin/setnx_locks/lock/"
SETTLE = "orders.tasks.settle(name='ann')"
PAUSE, END = "//input[@value='Yes, pause it']", "//input[@value='Yes, end it']"
MODEL = "//tr[contains(@class, 'model-lock')]//a[.='Locks']"
EVIL = "<script>document.title = 'taken'</script>"


def row(text: str) -> str:
    """The row of the table that has this text in it."""
    return f"//table[@class='locks']/tbody/tr[contains(., {text!r})]"


def term(text: str) -> str:
    """The row of a live term that has this text in it."""
    return f"//table[@class='locks terms']/tbody/tr[contains(., {text!r})]"


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


def test_migrations_have_all_permissions(shop):
    """A project's own check for missing migrations finds none."""
    assert "No changes detected" in shop.run("makemigrations", "--check", "--dry-run", "setnx_locks")


def test_page_says_that_redis_does_not_answer(browser, lost_web):
    """It does not say that there are no locks."""
    browser.log_in("bob")
    browser.go(LOCKS, lost_web)
    assert "Redis does not serve the lock shop:{*} now: " in browser.text("//*[@class='error']")
    assert "Nobody has a lock" not in browser.text()


# Live terms


@pytest.fixture
def live(shop):
    """Sets live terms as an operator at the command line does; afterwards there are none."""

    def set_one(whose, name, value="-", **about):
        set_term(shop.app, whose, NewTerm(name, 600.0, value, **{"because": "partner down", **about}))

    yield set_one
    for whose, terms in live_terms(shop.app).items():
        for each in terms:
            end_term(shop.app, whose, each.name, by="the test")


def only_term(shop) -> tuple[Whose, LiveTerm]:
    """The one live term that there is."""
    ((whose, (found,)),) = live_terms(shop.app).items()
    return whose, found


def test_staff_pauses_a_key_and_resumes_it(browser, shop, web, live):
    """After a confirmation each. What runs goes on; calls wait meanwhile; both logs say by whom."""
    first = shop.call("settle", "dan")
    key, before = shop.held(first).key, shop.entries()
    browser.log_in("ada")
    browser.go(LOCKS)
    browser.click(row(key) + "//a[1]")
    browser.click("//a[.='Pause this key']")
    browser.wait_for(PAUSE)
    assert (live_terms(shop.app), shop.entries()) == ({}, before)
    browser.write("for", "2h")
    browser.write("because", "partner down")
    browser.click(PAUSE)
    said = browser.text("//*[@class='success']")
    assert said.startswith(f"Paused {key} until 20")
    until = " ".join(said.split()[3:5])
    whose, pause = only_term(shop)
    assert (whose.key, pause.name, pause.by, pause.because) == (
        key,
        "pause",
        "ada in the admin",
        "partner down",
    )
    assert pause.until - pause.since == pytest.approx(7200, abs=60)

    second = shop.call("settle", "dan")
    shop.held(first, waiting=1)
    shop.end(first)
    wait_until(lambda: not byhand.look(shop.app, key).holder, "the first has ended")
    browser.go(LOCKS)
    assert "paused" in browser.text(row(key) + "/td[@data-label='State']")
    assert browser.text(row(key) + "/td[@data-label='Waiting']") == "1"
    for page in (LOCKS, browser.url_of(row(key) + "//a[1]")):
        browser.go(page)
        for told in ("paused", "ada in the admin", "partner down", until):
            assert told in browser.text(term(key))
    browser.click(term(key) + "//a[.='Resume']")
    browser.wait_for(END)
    assert only_term(shop) == (whose, pause)
    browser.click(END)
    assert browser.text("//*[@class='success']") == f"No longer paused: {key}."
    shop.held(second)
    assert live_terms(shop.app) == {}
    done = [f"Pause {key} for 2h: partner down", f"No longer paused: {key}."]
    assert shop.entries() == [*before, *(("ada", key, what) for what in done)]
    for what in done:
        assert what in browser.text("//table[contains(@class, 'entries')]")
    assert f"{key}: no longer paused; ended by ada in the admin." in web.log_text()


def test_task_that_nobody_calls_is_paused_and_resumed(browser, shop, live):
    """From a lock's page it is paused for a day; when there is no lock of it any more, from the list."""
    call = shop.call("fetch_rates", "ecb")
    key, before, scope = shop.held(call).key, shop.entries(), "orders.tasks.fetch_rates"
    browser.log_in("eve")
    browser.go(LOCKS)
    assert browser.count("//a[.='Release']") == 0
    browser.click(row(key) + "//a[1]")
    browser.click("//a[.='Pause the task']")
    browser.click(PAUSE)
    browser.wait_for("//*[@class='success']")
    whose, pause = only_term(shop)
    assert (whose, pause.by) == (Whose(scope=scope), "eve in the admin")
    assert pause.until - pause.since == pytest.approx(86400, abs=60)
    state = browser.text(row(key) + "/td[@data-label='State']")
    assert state.split() == ["running", "paused"]
    shop.end(call)
    wait_until(lambda: not byhand.look(shop.app, key).holder, "the call has ended")
    browser.go(LOCKS)
    assert browser.count("//table[@class='locks']") == 0
    browser.click(term(f"all calls of {scope}") + "//a[1]")
    assert browser.text(row(scope) + "/td[@data-label='State']") == "paused"
    assert browser.count("//a[.='Pause this key']") == 0
    browser.go(LOCKS)
    browser.click(term(f"all calls of {scope}") + "//a[.='Resume']")
    browser.click(END)
    assert browser.text("//*[@class='success']") == f"No longer paused: all calls of {scope}."
    assert live_terms(shop.app) == {}
    entries = shop.entries()[len(before) :]
    assert [what for _, _, what in entries] == [
        f"Pause all calls of {scope} for 1d.",
        f"No longer paused: all calls of {scope}.",
    ]
    assert {(user, of) for user, of, _ in entries} == {("eve", f"shop:{{{scope}}}")}


def test_user_who_may_not_pause_sees_what_is_paused(browser, shop, live):
    """Of a key without a lock, too. There is no button, and the server refuses: to release is not enough."""
    key, before = f"shop:{{orders.tasks.fetch_rates:{'0' * 32}}}", shop.entries()
    live(Whose(key=key), "pause", by="ana on ops1")
    live(Whose(key=key), "limit", 1)
    live(Whose(scope="orders.tasks.settle"), "rate", "10/m")
    browser.log_in("ada")
    browser.go(LOCKS)
    assert browser.text(row(key) + "/td[@data-label='State']").split("\n") == [
        "paused",
        "limited to 1 at a time",
    ]
    ends = [browser.url_of(term(what) + "//a[@class='button']") for what in ("paused", "at a time", "starts")]
    browser.click(row(key) + "//a[1]")
    pauses = [browser.url_of(f"//a[.='Pause {what}']") for what in ("this key", "the task")]
    here = browser.driver.current_url.removeprefix(browser.url)
    for user in ("bob", "dora"):
        browser.log_in(user)
        browser.go(LOCKS)
        assert "limited to 10 starts in 60 s" in browser.text(term("all calls of orders.tasks.settle"))
        for page in (LOCKS, here):
            browser.go(page)
            for told in ("paused", "ana on ops1", "partner down"):
                assert told in browser.text(term(key))
            assert browser.count("//a[@class='button']") == 0
        for url in (*ends, *pauses):
            assert (browser.status("GET", url), browser.status("POST", url)) == (403, 403)
    assert (len(live_terms(shop.app)), shop.entries()) == (2, before)
    browser.log_in("ada")
    for url in (*ends, *pauses):
        assert browser.status("POST", url, with_token=False) == 403
    browser.go(ends[1])
    browser.click(END)
    assert browser.text("//*[@class='success']") == f"No longer limited to 1 at a time: {key}."
    browser.go(ends[1])
    assert f"{key} has no live limit by now" in browser.text("//*[@class='warning']")


@pytest.mark.parametrize(
    ("lasts", "why"),
    [
        ("soon", "soon is not a duration: write 90s, 5m, 1h or 2d"),
        ("367d", "a year at most"),
        ("0", "a millisecond at least"),
    ],
)
def test_pause_for_what_is_no_duration_is_refused(browser, shop, live, lasts, why):
    """The form says why, and keeps the reason; nothing is paused, and nothing stands in Django's log."""
    before = shop.entries()
    browser.log_in("ada")
    browser.go(f"{LOCKS}{quote('shop:{orders.tasks.settle}')}/pause/task/")
    browser.write("for", lasts)
    browser.write("because", "partner down")
    browser.click(PAUSE)
    assert why in browser.text("//*[@class='error']")
    fields = [
        browser.wait_for(f"//input[@name={name!r}]", lambda it: it.get_attribute("value"))
        for name in ("for", "because")
    ]
    assert fields == [lasts, "partner down"]
    assert (live_terms(shop.app), shop.entries()) == ({}, before)


def test_pause_of_what_is_no_name_is_not_found(browser):
    """Nor is it for a key of another program, or for what is no live term."""
    browser.log_in("ada")
    settle = f"{LOCKS}{quote('shop:{orders.tasks.settle}')}"
    for url in (f"{settle}/pause/all/", f"{settle}/end/all/pause/", f"{LOCKS}session/pause/key/"):
        assert browser.status("GET", url) == 404


def test_what_a_live_term_says_is_shown_as_text(browser, shop, live):
    """On the list, on the page of its task, and where its end is confirmed."""
    live(Whose(scope=EVIL), "pause", by=EVIL, because=EVIL)
    browser.log_in("ada")
    browser.go(LOCKS)
    for link in (None, "//a[1]", "//a[.='Resume']"):
        if link:
            browser.click(term("document.title") + link)
        browser.wait_for(END if link and "Resume" in link else "//h2[.='Live terms']")
        assert browser.text(term("document.title")).count(EVIL) == 3
        assert browser.driver.title != "taken"


def test_pause_without_redis_says_so(browser, lost_web):
    """It is no error of the server."""
    url = f"{LOCKS}{quote('shop:{orders.tasks.settle}')}/pause/task/"
    browser.log_in("ada")
    browser.go(url, lost_web)
    assert "Redis does not serve the lock " in browser.text("//*[@class='error']")
    assert browser.status("POST", url) == 200
