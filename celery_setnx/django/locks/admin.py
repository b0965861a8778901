"""The page "Locks": who has which lock, who waits in line, and how to release one."""

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
from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.record import Holder
from celery_setnx.wording import printable

MOST = 500
"""How many locks the page shows at most."""


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """All locks; one, with its line; and its release by hand."""

    def get_urls(self) -> list[Any]:
        """The pages: the list, one lock, and its release."""
        return [
            path("", self.for_staff(self.list_locks), name="setnx_locks_lock_changelist"),
            path("<str:key>/", self.for_staff(self.show), name="setnx_locks_lock_change"),
            path(
                "<str:key>/release/<str:holder>/",
                self.for_staff(self.release),
                name="setnx_locks_lock_release",
            ),
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

    def list_locks(self, request: Any) -> Any:
        """Every lock; of several permits a row for each holder."""
        found = list(islice(byhand.locks(current_app), MOST + 1))
        if len(found) > MOST:
            messages.warning(request, f"There are more locks. These are the first {MOST}.")
        return self.page(request, "Locks", rows=[row for seen in found[:MOST] for row in rows_of(seen)])

    def show(self, request: Any, key: str) -> Any:
        """One lock, who waits in line for it, and who has released it by hand."""
        seen = self.look(unquote(key))
        entries = LogEntry.objects.filter(content_type=ContentType.objects.get_for_model(Lock))
        return self.page(
            request,
            f"{seen.task}({seen.about})" if seen.about else seen.task,
            "lock.html",
            rows=rows_of(seen),
            waiters=[(one.place, one.task_id, span(one.age_s)) for one in byhand.waiters(current_app, seen)],
            entries=entries.filter(object_id=seen.key).select_related("user")[:20],
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
        is_released = byhand.release(current_app, seen, by=f"{request.user} in the admin")
        if not is_released:
            entry.change_message = f"Not released: it was free, or another's, by then. {held}"
            entry.save()
        return is_released

    def look(self, key: str) -> Sighting:
        """What there is of one lock; a 404 if that is no name of one."""
        try:
            return byhand.look(current_app, key)
        except ValueError:
            raise Http404 from None

    def page(self, request: Any, title: str, template: str = "locks.html", **context: Any) -> Any:
        """A page of the admin."""
        context |= {"title": title, "opts": Lock._meta, "may_release": self.has_release_permission(request)}
        context |= self.admin_site.each_context(request)
        return TemplateResponse(request, f"admin/setnx_locks/{template}", context)


def rows_of(seen: Sighting) -> list[dict[str, Any]]:
    """A row for each holder of a lock, or one for who waits though nobody has it."""
    return [row_of(one) for one in seen.of_each()] or [row_of(seen)]


def row_of(seen: Sighting) -> dict[str, Any]:
    """What a row shows."""
    holder, key = seen.holder, quote(seen.key)
    return {
        "seen": seen,
        "holder": holder,
        "state": state_of(seen),
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
    return seen.holder.state if seen.holder else "paced" if seen.is_paced else "free"


def id_of(holder: Holder) -> str:
    """What tells a holder from the next: permit, fence and state; of a foreign one, its value."""
    value = "" if holder.fence else printable(holder.value)
    return str(quote(f"{holder.permit}-{holder.fence}-{holder.state}-{value}"))


def span(seconds: float | None) -> str:
    """Seconds as hours, minutes and seconds."""
    return "" if seconds is None else str(timedelta(seconds=max(0, round(seconds))))
