from celery_setnx import is_skipped
def test_x(tasks, journal, gates):
    first = tasks.work.delay("gated-a")
    journal.wait_for("start", task_id=first.id)
    second = tasks.work.delay("gated-a")
    r = second.get(timeout=10)
    print(r)
    assert is_skipped(r)
    gates("gated-a")
    assert first.get(timeout=10) == "gated-a"
    print(journal.entries())
    assert journal.words(first.id) == ["acquired","start","end","released","postrun"]
