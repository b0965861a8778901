"""The page "Locks": who has which lock, who waits in line, and how to release one."""

from datetime import datetime, timedelta, timezone
from itertools import islice

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

from celery_setnx import LockRefused, LockUnavailable, byhand

from .models import Lock

MOST = 500


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):
    """All locks; one, with its line; and its release by hand."""

    def get_urls(self):
        return [
            path("", self.for_staff(self.list_locks), name="locks_lock_changelist"),
            path("<str:key>/", self.for_staff(self.show), name="locks_lock_change"),
            path("<str:key>/release/<str:holder>/", self.for_staff(self.release), name="locks_lock_release"),
        ]

    def for_staff(self, view):
        """The view for those who may see locks; it says so if Redis does not answer."""

        def shown(request, **which):
            if not self.has_view_permission(request):
                raise PermissionDenied
            try:
                return view(request, **which)
            except (LockUnavailable, LockRefused) as error:
                messages.error(request, str(error))
                return self.page(request, "Locks")

        return self.admin_site.admin_view(shown)  # no POST without its CSRF token

    def has_release_permission(self, request):
        return request.user.has_perm("locks.release_lock")

    def list_locks(self, request):
        """Every lock; of several permits a row for each holder."""
        found = list(islice(byhand.locks(current_app), MOST + 1))
        if len(found) > MOST:
            messages.warning(request, f"There are more locks. These are the first {MOST}.")
        return self.page(request, "Locks", rows=[row for seen in found[:MOST] for row in rows_of(seen)])

    def show(self, request, key):
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

    def release(self, request, key, holder):
        """Ask, and on POST release the lock of the holder that was shown; nobody else's."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        seen = self.look(unquote(key))
        found = [one for one in seen.of_each() if id_of(one.holder) == holder]
        if found and request.method != "POST":
            return self.page(request, "Release?", "release.html", rows=rows_of(found[0]), is_asked=True)
        if found and self.is_released(request, found[0]):
            messages.success(request, f"Released {found[0].name}.")
        else:
            messages.warning(request, f"Not released: {seen.key} is free, or another's, by now.")
        return redirect("admin:locks_lock_change", quote(seen.key))

    def is_released(self, request, seen):
        held = f"It was held by {seen.holder}."
        entry = self.log_change(request, Lock(seen.key), f"Release by hand. {held}")  # first: none without it
        is_released = byhand.release(current_app, seen, by=f"{request.user} in the admin")
        if not is_released:
            entry.change_message = f"Not released: it was free, or another's, by then. {held}"
            entry.save()
        return is_released

    def look(self, key):
        try:
            return byhand.look(current_app, key)
        except ValueError:
            raise Http404 from None

    def page(self, request, title, template="locks.html", **context):
        context |= {"title": title, "opts": Lock._meta, "may_release": self.has_release_permission(request)}
        context |= self.admin_site.each_context(request)
        return TemplateResponse(request, f"admin/locks/{template}", context)


def rows_of(seen):
    """A row for each holder of a lock, or one for who waits though nobody has it."""
    return [row_of(one) for one in seen.of_each()] or [row_of(seen)]


def row_of(seen):
    holder, key = seen.holder, quote(seen.key)
    return {
        "seen": seen,
        "holder": holder,
        "state": state_of(seen),
        "since": holder and holder.since and datetime.fromtimestamp(holder.since, timezone.utc),
        "age": span(seen.age_s),
        "ends_in": span(seen.remaining_s),
        "url": reverse("admin:locks_lock_change", args=[key]),
        "release_url": holder and reverse("admin:locks_lock_release", args=[key, id_of(holder)]),
    }


def state_of(seen):
    if seen.is_stale:
        return "stale"
    return seen.holder.state if seen.holder else "paced" if seen.is_paced else "free"


def id_of(holder):
    """What tells a holder from the next: permit, fence and state; of a foreign one, its value."""
    return quote(f"{holder.permit}-{holder.fence}-{holder.state}-{'' if holder.fence else holder.value}")


def span(seconds):
    return "" if seconds is None else str(timedelta(seconds=max(0, round(seconds))))
