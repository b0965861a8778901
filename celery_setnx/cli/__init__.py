"""The command `celery setnx`: what locks there are, who is in the way, and what is wrong.

Celery imports this module whatever its command, so what is heavy is imported where it is needed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

if TYPE_CHECKING:
    from celery import Celery
    from rich.console import RenderableType

    from celery_setnx.doctor.app import Finding

NO = 1
"""Exit code of an answer that is no, and when something is wrong."""

_LEVELS = {"ok": "green", "warning": "yellow", "error": "red"}


class _Group(click.Group):
    """Says in one line what went wrong, and ends with an exit code that scripts can tell apart."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except Exception as error:
            from celery_setnx.cli.asked import told

            in_one_line = told(ctx.obj.app, error)
            if in_one_line is None:
                raise
            raise in_one_line from error


def _handling_preload_options(function: Callable[..., None]) -> Callable[..., None]:
    return handle_preload_options(function)  # type: ignore[no-any-return]


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
@_handling_preload_options
def setnx(ctx: click.Context, **_preload: Any) -> None:
    """Look after the locks of an app's tasks.

    Exit codes: 0 fine; 1 the answer is no, or something is wrong; 2 wrong usage; 3 Redis does not answer, or
    refuses.
    """


def _as_json(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def _of_call(function: Any) -> Any:
    """The arguments that name a call."""
    function = click.option("--kwargs", metavar="JSON", help="Keyword arguments: a JSON object.")(function)
    function = click.option("--args", "args_json", metavar="JSON", help="Arguments: a JSON array.")(function)
    return click.argument("arguments", nargs=-1, metavar="[ARGS]...")(function)


@setnx.command("list")
@click.option("--task", metavar="NAME", help="Only those of this task.")
@click.option("--stale", is_flag=True, help="Only locks whose deadline has passed: their holders have died.")
@click.option("--queued", is_flag=True, help="Marks instead of locks: the calls that are queued.")
@_as_json
@click.pass_context
def list_(ctx: click.Context, task: str | None, stale: bool, queued: bool, as_json: bool) -> None:
    """List the locks: task, state, age, deadline, who waits, holder.

    A task is the one that the lock's record names, or the scope. Reads by SCAN, so it may run in production.
    """
    if stale and queued:
        raise click.UsageError("--stale is about locks, --queued about marks; give one of them")
    from celery_setnx.cli.asked import find, loaded, prefix, unknown
    from celery_setnx.cli.describe import COLUMNS, MARK_COLUMNS, cells, many, mark_cells, mark_row, row, table

    app = loaded(ctx.obj.app)
    gc.freeze()  # else, of 100,000 locks, a fourth of the time is spent on cycles in what is loaded
    found = find(app, task, stale=stale, queued=queued)
    if as_json:
        count = _print_json(map(mark_row if queued else row, found))
    else:
        rows = list(map(mark_cells if queued else cells, found))
        count = len(rows)
        if rows:
            click.echo("\n".join(table(MARK_COLUMNS if queued else COLUMNS, rows)))
    what = "mark" if queued else "stale lock" if stale else "lock"
    what = many(count, what) if count else f"No {what}s"
    of = f" of {task}" if task else ""
    hint = f" {unknown(app, task)}" if task and not count and task not in app.tasks else ""
    click.echo(f"{what}{of} under {prefix(app)}:{{...}}.{hint}", err=True)


@setnx.command()
@click.argument("target", metavar="KEY|TASK")
@_of_call
@_as_json
@click.pass_context
def show(
    ctx: click.Context,
    target: str,
    arguments: tuple[str, ...],
    args_json: str | None,
    kwargs: str | None,
    as_json: bool,
) -> None:
    """Show all that is known of one lock.

    Its record, its last take-over, its mark, and who waits in line.

    Give its key, or a task and a call's arguments. Each of ARGS is JSON, or else text; name=value is a
    keyword argument. Put -- before arguments that begin with a dash. What this leaves ambiguous, give by
    --args and --kwargs.
    """
    from celery_setnx.cli.asked import key_of, loaded, look_at, unknown
    from celery_setnx.cli.describe import all_of, page
    from celery_setnx.connection import client_for
    from celery_setnx.lock.survey import waiters
    from celery_setnx.lock.takeover import last_take_over

    app = loaded(ctx.obj.app)
    if target in app.tasks:
        key = key_of(app.tasks[target], arguments, args_json, kwargs)
    elif arguments or args_json or kwargs:
        raise click.UsageError(unknown(app, target))
    else:
        key = target
    sighting = look_at(app, key)
    if "{" not in key and sighting.raw == (None, None):
        raise click.UsageError(f"{unknown(app, key)} Nor is there a lock of that name.")
    client = client_for(app)
    line = waiters(client, key, sighting.server_time)
    details = all_of(sighting, last_take_over(client, key), line)
    if as_json:
        click.echo(json.dumps(details, indent=2))
    else:
        click.echo("\n".join(page(details, sighting)))


@setnx.command()
@click.argument("task")
@_of_call
@click.pass_context
def why(
    ctx: click.Context, task: str, arguments: tuple[str, ...], args_json: str | None, kwargs: str | None
) -> None:
    """Say whether a call would run now, and who is in the way.

    Since when, until when, whether that process lives, and what would become of the call.

    ARGS are read as `show` reads them. Exit code 0: it would run. 1: it would not.
    """
    from celery_setnx.cli.asked import key_of, loaded, look_at, the_guard_of, unknown
    from celery_setnx.cli.describe import verdict

    app = loaded(ctx.obj.app)
    if task not in app.tasks:
        raise click.UsageError(unknown(app, task))
    key = key_of(app.tasks[task], arguments, args_json, kwargs)
    runs, (reason, *more) = verdict(the_guard_of(app.tasks[task]), look_at(app, key))
    click.echo(f"{'Yes' if runs else 'No'}: {reason}")
    for line in (*more, f"The key is {key}"):
        click.echo(f"  {line}")
    ctx.exit(0 if runs else NO)


@setnx.command()
@click.argument("key", required=False)
@click.option("--queued", is_flag=True, help="Free the marks of a task, as a purge leaves them behind.")
@click.option("--task", metavar="NAME", help="The task whose marks --queued frees.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Release even what a living process may hold.")
@click.pass_context
def release(
    ctx: click.Context, key: str | None, queued: bool, task: str | None, yes: bool, force: bool
) -> None:
    """Release a lock by hand, or free the marks of a task.

    What is shown is what is deleted: if it has changed meanwhile, nothing is touched. A lock whose deadline
    has not passed, and whose process is not surely dead, is only released with --force. The first who waits
    in line has its turn.
    """
    if (key is None) != queued or queued != (task is not None):
        raise click.UsageError("give a KEY, or --queued and --task NAME")
    from celery_setnx.cli.asked import loaded
    from celery_setnx.cli.byhand import free_marks, release_lock

    app = loaded(ctx.obj.app)
    if key is not None:
        release_lock(app, key, yes=yes, force=force)
    else:
        free_marks(app, str(task), yes=yes)


@setnx.command()
@click.option("--task", metavar="NAME", help="Only locks of this task.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.pass_context
def watch(ctx: click.Context, task: str | None, interval: float) -> None:
    """Watch the locks in a live table, until Ctrl-C. Needs rich: celery_setnx[cli]."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise click.ClickException(
            "watch needs rich, which is not installed: pip install 'celery_setnx[cli]'"
        ) from None
    from celery_setnx.cli.asked import loaded

    app = loaded(ctx.obj.app)
    console = Console(no_color=True if ctx.obj.no_color else None)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_picture(app, task, console.height), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        ctx.exit(0)


@setnx.command()
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@_as_json
@click.pass_context
def check(ctx: click.Context, strict: bool, as_json: bool) -> None:
    """Check the options of all tasks, for CI.

    Asks no server.
    """
    from celery_setnx.doctor import check

    _report(ctx, check, strict=strict, as_json=as_json)


@setnx.command()
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@_as_json
@click.pass_context
def doctor(ctx: click.Context, strict: bool, as_json: bool) -> None:
    """Examine the lock server, the settings and the tasks.

    Tries all that a lock needs, a take-over included. Each finding says what, why it matters, what to do.
    """
    from celery_setnx.doctor.server import examine

    _report(ctx, examine, strict=strict, as_json=as_json)


def _report(
    ctx: click.Context, examine: Callable[[Celery], Iterable[Finding]], *, strict: bool, as_json: bool
) -> None:
    """Print what is found of the app, as it comes; the exit code says whether any of it is bad."""
    from celery_setnx.cli.asked import imported
    from celery_setnx.cli.describe import many
    from celery_setnx.doctor.app import refused
    from celery_setnx.exceptions import OptionError

    counts = dict.fromkeys(_LEVELS, 0)

    def seen() -> Iterator[Finding]:
        try:
            findings = examine(imported(ctx.obj.app))
        except OptionError as error:
            findings = [refused(error)]
        for finding in findings:
            counts[finding.level] += 1
            yield finding

    if as_json:
        _print_json(finding.as_dict() for finding in seen())
    else:
        for finding in seen():
            level = ctx.obj.style(f"{finding.level:8}", fg=_LEVELS[finding.level])
            click.echo(f"{level} {finding.subject}: {finding.what}")
            for more in filter(None, (finding.why, finding.do)):
                click.echo(f"{'':9}{more}")
    total = f"{counts['ok']} ok, {many(counts['warning'], 'warning')}, {many(counts['error'], 'error')}."
    click.echo(total, err=True)
    ctx.exit(NO if counts["error"] or (strict and counts["warning"]) else 0)


def _print_json(rows: Iterable[dict[str, Any]]) -> int:
    """Print a JSON array, a row a line as they come; how many there were."""
    count = 0
    for count, row in enumerate(rows, 1):  # click.echo flushes each line, which takes longer than the rest
        sys.stdout.write((",\n " if count > 1 else "[") + json.dumps(row))
    sys.stdout.write("]\n" if count else "[]\n")
    sys.stdout.flush()
    return count


def _picture(app: Celery, task: str | None, height: int) -> RenderableType:
    """The locks as a table that fits the screen; what is wrong, while Redis does not answer."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from celery_setnx.cli.asked import find, server
    from celery_setnx.cli.describe import COLUMNS, cells, many
    from celery_setnx.lock.scripts import REDIS_ERRORS

    try:
        found = list(find(app, task, stale=False, queued=False))
    except REDIS_ERRORS as error:
        return Text(f"{server(app)}: {type(error).__name__}: {error}\nAsked again; Ctrl-C ends.", "red")
    table = Table(caption_justify="left")
    for heading in COLUMNS.values():
        table.add_column(heading, no_wrap=True)
    room = max(1, height - 6)
    for sighting in found[:room]:
        table.add_row(*map(escape, cells(sighting)), style="red" if sighting.is_stale else None)
    hidden = f", {len(found) - room} of them not shown" if len(found) > room else ""
    table.caption = f"{many(len(found), 'lock')}{hidden}, {time.strftime('%H:%M:%S')}. Ctrl-C ends."
    return table
