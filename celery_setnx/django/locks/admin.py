"""The page "Locks": who has which lock, who waits in line, what is paused, and how to change that by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Any

from celery import current_app
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote, unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import Http404
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from celery_setnx import byhand
from celery_setnx.byhand import Sighting
from celery_setnx.django.locks.models import Lock
from celery_setnx.exceptions import LockRefused, LockUnavailable, OptionError
from celery_setnx.lock.live import live_terms_of
from celery_setnx.lock.names import key_name
from celery_setnx.lock.record import Holder, clock
from celery_setnx.options import seconds_of, settings_of
from celery_setnx.terms import LiveTerm, NewTerm, Whose, end_term, live_terms, set_term
from celery_setnx.wording import printable

MOST = 500
"""How many locks, and how many live terms, the page shows at most."""

BECAUSE = 200
"""Characters that a reason may have."""


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """All locks; one, with its line; its release by hand, and its pause."""

    def get_urls(self) -> list[Any]:
        """The pages: the list, one lock, its release, a pause, and the end of a live term."""
        return [
            path("", self.for_staff(self.list_locks), name="setnx_locks_lock_changelist"),
            path("<str:key>/", self.for_staff(self.show), name="setnx_locks_lock_change"),
            path(
                "<str:key>/release/<str:holder>/",
                self.for_staff(self.release),
                name="setnx_locks_lock_release",
            ),
            path("<str:key>/pause/<str:of>/", self.for_staff(self.pause), name="setnx_locks_lock_pause"),
            path("<str:key>/end/<str:of>/<str:name>/", self.for_staff(self.end), name="setnx_locks_lock_end"),
        ]

    def for_staff(self, view: Callable[..., Any]) -> Any:
        """The view for those who may see locks; it says so if Redis does not answer."""

        def shown(request: Any, **which: str) -> Any:
            if not self.has_view_permission(request):
                raise PermissionDenied
            try:
                return view(request, **which)
            except (LockUnavailable, LockRefused) as error:
                messages.error(request, str(error))
                return self.page(request, "Locks")

        return self.admin_site.admin_view(shown)  # no POST without its CSRF token

    def has_release_permission(self, request: Any) -> bool:
        """Whether the user may release locks by hand."""
        return bool(request.user.has_perm("setnx_locks.release_lock"))

    def has_pause_permission(self, request: Any) -> bool:
        """Whether the user may pause keys and tasks, and end live terms."""
        return bool(request.user.has_perm("setnx_locks.pause_lock"))

    def list_locks(self, request: Any) -> Any:
        """Every lock, of several permits a row for each holder; and all live terms."""
        found = list(islice(byhand.locks(current_app), MOST + 1))
        live = [(whose, term) for whose, terms in live_terms(current_app).items() for term in terms]
        for what, all_of_them in (("locks", found), ("live terms", live)):
            if len(all_of_them) > MOST:
                messages.warning(request, f"There are more {what}. These are the first {MOST}.")
        rows = [row for seen in found[:MOST] for row in rows_of(seen)]
        return self.page(request, "Locks", rows=rows, terms=[row_of_term(*each) for each in live[:MOST]])

    def show(self, request: Any, key: str) -> Any:
        """One lock, its live terms, who waits in line for it, and what was done to it by hand."""
        seen = self.look(unquote(key))
        names = [seen.key, page_key(Whose(scope=seen.scope))]
        entries = LogEntry.objects.filter(content_type=ContentType.objects.get_for_model(Lock))
        return self.page(
            request,
            f"{seen.task}({seen.about})" if seen.about else seen.task,
            "lock.html",
            rows=rows_of(seen),
            terms=[row_of_term(*each) for each in terms_of(seen)],
            waiters=[(one.place, one.task_id, span(one.age_s)) for one in byhand.waiters(current_app, seen)],
            entries=entries.filter(object_id__in=names).select_related("user")[:20],
        )

    def release(self, request: Any, key: str, holder: str) -> Any:
        """Ask, and on POST release the lock of the holder that was shown; nobody else's."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        seen = self.look(unquote(key))
        found = [one for one in seen.of_each() if one.holder and id_of(one.holder) == holder]
        if found and request.method != "POST":
            return self.page(request, "Release?", "release.html", rows=rows_of(found[0]), is_asked=True)
        if found and self.is_released(request, found[0]):
            messages.success(request, f"Released {found[0].name}.")
        else:
            messages.warning(request, f"Not released: {seen.key} is free, or another's, by now.")
        return redirect("admin:setnx_locks_lock_change", quote(seen.key))

    def is_released(self, request: Any, seen: Sighting) -> bool:
        """Release it, with an entry in Django's own log that stands there before."""
        held = f"It was held by {seen.holder}."
        entry = self.log_change(request, Lock(seen.key), f"Release by hand. {held}")  # first: none without it
        is_released = byhand.release(current_app, seen, by=by(request))
        if not is_released:
            entry.change_message = f"Not released: it was free, or another's, by then. {held}"
            entry.save()
        return is_released

    def pause(self, request: Any, key: str, of: str) -> Any:
        """Ask for how long, and why, and on POST let no call of a key start, or of all keys of a task."""
        if not self.has_pause_permission(request):
            raise PermissionDenied
        seen = self.look(unquote(key))
        whose = whose_of(seen, of)
        if request.method == "POST":
            try:
                messages.success(request, self.paused(request, whose))
                return redirect("admin:setnx_locks_lock_change", quote(seen.key))
            except OptionError as error:
                messages.error(request, f"Not paused: {error}.")
        return self.page(
            request,
            f"Pause {whose}?" if whose.scope else "Pause this key?",
            "pause.html",
            rows=rows_of(seen),
            terms=[row_of_term(*each) for each in terms_of(seen) if each[0] == whose],
            whose=whose,
            for_s=request.POST.get("for", "1d"),
            because=request.POST.get("because", ""),
            most=BECAUSE,
            is_asked=True,
        )

    def paused(self, request: Any, whose: Whose) -> str:
        """Pause it, with an entry in Django's own log that stands there before: what is to be said."""
        for_s = request.POST.get("for", "").strip() or "1d"
        because = printable(request.POST.get("because", "").strip())[:BECAUSE]
        term = NewTerm("pause", seconds_of(for_s), because=because, by=by(request))
        why = f": {because}" if because else "."
        entry = self.log_change(request, Lock(page_key(whose)), f"Pause {whose} for {for_s}{why}")
        try:
            change = set_term(current_app, whose, term)
        except OptionError:
            entry.delete()
            raise
        pause = next(each for each in change.after if each.name == "pause")
        return f"Paused {whose} until {clock(pause.until)}."

    def end(self, request: Any, key: str, of: str, name: str) -> Any:
        """Ask, and on POST end a live term of a key, or of all keys of a task."""
        if not self.has_pause_permission(request):
            raise PermissionDenied
        seen = self.look(unquote(key))
        whose = whose_of(seen, of)
        found = (term for each, term in terms_of(seen) if (each, term.name) == (whose, name))
        term = next(found, None)
        if term and request.method != "POST":
            told = {"rows": rows_of(seen), "terms": [row_of_term(whose, term)]}
            return self.page(request, f"End the {name}?", "end.html", **told, is_asked=True)
        if term and self.is_ended(request, whose, term):
            messages.success(request, f"No longer {term.what}: {whose}.")
        else:
            messages.warning(request, f"Nothing has changed: {whose} has no live {name} by now.")
        return redirect("admin:setnx_locks_lock_change", quote(seen.key))

    def is_ended(self, request: Any, whose: Whose, term: LiveTerm) -> bool:
        """End it, with an entry in Django's own log that stands there before."""
        entry = self.log_change(request, Lock(page_key(whose)), f"No longer {term.what}: {whose}.")
        change = end_term(current_app, whose, term.name, by=by(request))
        is_ended = any(each.name == term.name for each in change.before)
        if not is_ended:
            entry.change_message = f"Nothing has changed: {whose} was not {term.what} by then."
            entry.save()
        return is_ended

    def look(self, key: str) -> Sighting:
        """What there is of one lock; a 404 if that is no name of one."""
        try:
            return byhand.look(current_app, key)
        except ValueError:
            raise Http404 from None

    def page(self, request: Any, title: str, template: str = "locks.html", **context: Any) -> Any:
        """A page of the admin."""
        context |= {
            "title": title,
            "opts": Lock._meta,
            "may_release": self.has_release_permission(request),
            "may_pause": self.has_pause_permission(request),
        }
        context |= self.admin_site.each_context(request)
        return TemplateResponse(request, f"admin/setnx_locks/{template}", context)


def rows_of(seen: Sighting) -> list[dict[str, Any]]:
    """A row for each holder of a lock, or one for who waits though nobody has it."""
    return [row_of(one) for one in seen.of_each()] or [row_of(seen)]


def row_of(seen: Sighting) -> dict[str, Any]:
    """What a row shows."""
    holder, key, state = seen.holder, quote(seen.key), state_of(seen)
    live = {term.name: term.what for _, term in terms_of(seen)}  # a key's count above its task's
    return {
        "seen": seen,
        "holder": holder,
        "state": state,
        "live": [what for what in live.values() if what != state],
        "since": holder and holder.since and datetime.fromtimestamp(holder.since, timezone.utc),
        "age": span(seen.age_s),
        "ends_in": span(seen.remaining_s),
        "url": reverse("admin:setnx_locks_lock_change", args=[key]),
        "release_url": holder and reverse("admin:setnx_locks_lock_release", args=[key, id_of(holder)]),
    }


def state_of(seen: Sighting) -> str:
    """The word for what is to be seen of a lock."""
    if seen.is_stale:
        return "stale"
    if seen.holder:
        return seen.holder.state
    return seen.word if seen.is_paced or seen.is_paused else "free"


def terms_of(seen: Sighting) -> list[tuple[Whose, LiveTerm]]:
    """The live terms that count for a lock: those of its task, and its own."""
    of_task = live_terms_of(seen.asked.live, seen.server_time)
    each_of = ((Whose(scope=seen.scope), of_task), (Whose(key=seen.key), seen.live))
    return [(whose, term) for whose, terms in each_of for term in terms]


def row_of_term(whose: Whose, term: LiveTerm) -> dict[str, Any]:
    """What a row shows."""
    key = quote(page_key(whose))
    return {
        "whose": whose,
        "term": term,
        "until": datetime.fromtimestamp(term.until, timezone.utc),
        "url": reverse("admin:setnx_locks_lock_change", args=[key]),
        "end_url": reverse(
            "admin:setnx_locks_lock_end", args=[key, "task" if whose.scope else "key", term.name]
        ),
    }


def whose_of(seen: Sighting, of: str) -> Whose:
    """Whose live terms a page changes: a key's, or those of its task."""
    if of not in ("key", "task"):
        raise Http404
    return Whose(key=seen.key) if of == "key" else Whose(scope=seen.scope)


def page_key(whose: Whose) -> str:
    """The key under which the page and Django's log have it: of a task, the lock of the whole task."""
    return whose.key or key_name(settings_of(current_app).prefix, whose.scope, "")


def by(request: Any) -> str:
    """Who does it, for the log and for whoever asks."""
    return f"{request.user} in the admin"


def id_of(holder: Holder) -> str:
    """What tells a holder from the next: permit, fence and state; of a foreign one, its value."""
    value = "" if holder.fence else printable(holder.value)
    return str(quote(f"{holder.permit}-{holder.fence}-{holder.state}-{value}"))


def span(seconds: float | None) -> str:
    """Seconds as hours, minutes and seconds."""
    return "" if seconds is None else str(timedelta(seconds=max(0, round(seconds))))
