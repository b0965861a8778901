"""The command `celery setnx`: what locks there are, who is in the way, and what is wrong.

Celery imports this module whatever its command, so what is heavy is imported where it is needed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

if TYPE_CHECKING:
    from celery import Celery
    from rich.console import ConsoleDimensions
    from rich.text import Text

    from celery_setnx.doctor.app import Finding

NO = 1
"""Exit code of an answer that is no, and when something is wrong."""

_ONE_KIND = (
    "list one kind at a time: locks (--stale and --older may be combined), --queued marks, or --done calls "
    "that have succeeded"
)
_WHAT_TO_RELEASE = (
    "name the lock: a KEY, or a TASK and its ARGS. --queued takes --task NAME instead, and --done takes "
    "either"
)
_LEVELS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


class _Group(click.Group):
    """Says in one line what went wrong, and ends with an exit code that scripts can tell apart."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            from celery_setnx.cli.asked import told
            from celery_setnx.cli.screen import whole_words
            from celery_setnx.wording import printable

            in_one_line = error if isinstance(error, click.ClickException) else told(ctx.obj.app, error)
            if in_one_line is None:
                raise
            label = getattr(in_one_line, "label", "Error: ")
            message = whole_words(printable(in_one_line.message), err=True, after=label)
            vars(in_one_line)["message"] = message
            raise in_one_line from (error.__cause__ if in_one_line is error else error)


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


class _Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore] # generic since click 8.3
    """Seconds, written as `90`, `90s`, `5m`, `1h` or `2d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        from celery_setnx.exceptions import OptionError
        from celery_setnx.options import seconds_of

        try:
            return seconds_of(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)


def _as_json(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def _of_call(function: Any) -> Any:
    """The arguments that name a call."""
    function = click.option("--kwargs", metavar="JSON", help="Keyword arguments: a JSON object.")(function)
    function = click.option("--args", "args_json", metavar="JSON", help="Arguments: a JSON array.")(function)
    return click.argument("arguments", nargs=-1, metavar="[ARGS]...")(function)


@setnx.command("list")
@click.option("--task", metavar="NAME", help="Only those of this task.")
@click.option("--stale", is_flag=True, help="Only locks whose deadline has passed, or whose process is dead.")
@click.option("--older", type=_Duration(), metavar="1h", help="Only locks held for longer: 90s, 5m, 1h, 2d.")
@click.option("--queued", is_flag=True, help="Marks instead of locks: the calls that are queued.")
@click.option("--done", is_flag=True, help="Calls that have succeeded, and still make duplicates.")
@_as_json
@click.pass_context
def list_(
    ctx: click.Context, /, task: str | None, as_json: bool, older: float | None, **chosen: bool
) -> None:
    """List the locks, and who has them.

    With several permits the state says how many are held ("3/5"), and the row shows the holder to look at
    first. The deadline of a paced lock is when the next call may start. Only its own host knows whether a
    process is dead. Reads by SCAN, so it is safe in production. A terminal gets what fits its width.
    """
    if (older is not None) + chosen["queued"] + chosen["done"] > 1 or sum(chosen.values()) > 1:
        raise click.UsageError(_ONE_KIND)
    from celery_setnx.cli.asked import find, find_done, loaded, prefix, unknown
    from celery_setnx.cli.describe import many, shape_of, span
    from celery_setnx.cli.screen import Line, left_out, say, table, width

    app = loaded(ctx.obj.app)
    gc.freeze()  # else, of 100,000 locks, a fourth of the time is spent on cycles in what is loaded
    done, queued, stale = chosen["done"], chosen["queued"], chosen["stale"]
    found = find_done(app, task) if done else find(app, task, stale=stale, queued=queued, older_s=older)
    shape, hidden = shape_of(done=done, queued=queued), ""
    if as_json:
        count = _print_json(map(shape.row, found))
    else:
        count, widest, said = 0, list(shape.columns), ""
        # A thousand rows at a time: 100,000 took 150 MB. A column may get wider on the way.
        while block := list(islice(found, 1000)):
            rows = [shape.cells(one) for one in block]
            heading, _, *lines = table(shape.columns, [widest, *rows], width())
            looks = map(shape.style, block)
            shown = [Line(line, look) if look else line for line, look in zip(lines, looks)]
            say(*([] if heading == said else [heading]), *shown)
            said, hidden = heading, left_out(shape.columns, heading, ", or pipe to less -S")
            widest = [max(column, key=len) for column in zip(widest, *rows)]
            count += len(block)
    what = "stale lock" if stale else shape.name
    what = many(count, what) if count else f"No {what}s"
    of = (f" of {task}" if task else "") + (f" held for {span(older)} or more" if older else "")
    hint = f" {unknown(app, task)}" if task and not count and task not in app.tasks else ""
    say(f"{what}{of} under {prefix(app)}:{{...}}.{hint}{hidden}", err=True)


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

    Its holder, starts, last take-over, mark and line, and the call that has
    succeeded and makes duplicates.

    Give its key, or a task and a call's arguments. Each of ARGS is JSON, or else text; name=value is a
    keyword argument. Put -- before arguments that begin with a dash. If that is not exact enough, use
    --args and --kwargs.
    """
    from celery_setnx.cli.asked import loaded, sight
    from celery_setnx.cli.describe import all_of, page
    from celery_setnx.cli.screen import say
    from celery_setnx.connection import client_for
    from celery_setnx.lock.takeover import last_take_over

    app = loaded(ctx.obj.app)
    sighting, about, instead = sight(app, target, arguments, args_json, kwargs)
    details = all_of(sighting, last_take_over(client_for(app), sighting.key))
    if as_json:
        click.echo(json.dumps(details, indent=2))
    else:
        say(*page(details, sighting, about), *([instead] if instead else []))


@setnx.command()
@click.argument("task")
@_of_call
@_as_json
@click.pass_context
def why(
    ctx: click.Context,
    task: str,
    arguments: tuple[str, ...],
    args_json: str | None,
    kwargs: str | None,
    as_json: bool,
) -> None:
    """Say whether a call would run now, and who is in the way.

    Since when, until when, whether that process lives, and what the call would do.

    ARGS are read as `show` reads them. Exit code 0: it would run. 1: it would not.
    """
    from celery_setnx.cli.asked import loaded, sight_call, the_guard_of, unknown
    from celery_setnx.cli.describe import answer, verdict
    from celery_setnx.cli.screen import say
    from celery_setnx.wording import titled

    app = loaded(ctx.obj.app)
    if task not in app.tasks:
        raise click.UsageError(unknown(app, task))
    guard = the_guard_of(app.tasks[task])
    sighting, about, instead = sight_call(app, app.tasks[task], arguments, args_json, kwargs, guard)
    exact = [word for option in (("--args", args_json), ("--kwargs", kwargs)) if option[1] for word in option]
    runs, because = verdict(guard.options, sighting, (task, *arguments, *map(str, exact)))
    because += [instead] if instead else []
    if as_json:
        told = answer(runs, because, sighting)
        click.echo(json.dumps({**told, "about": told["about"] or about}, indent=2))
    else:
        reason, *more = because
        more.append(f"The key of {titled(task, sighting.about or about)} is {sighting.key}")
        say(f"{'Yes' if runs else 'No'}: {reason}", *(f"  {line}" for line in more))
    ctx.exit(0 if runs else NO)


@setnx.command()
@click.argument("target", required=False, metavar="[KEY|TASK]")
@_of_call
@click.option("--queued", is_flag=True, help="Free the marks of a task, after a purge.")
@click.option("--done", is_flag=True, help="Forget that a call has succeeded, or all calls of a task.")
@click.option("--starts", is_flag=True, help="Forget the starts of a key that count for its rate.")
@click.option("--task", metavar="NAME", help="The task, with --queued or --done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Release a lock even if its holder may be running.")
@click.pass_context
def release(ctx: click.Context, /, target: str | None, task: str | None, **given: Any) -> None:
    """Release a lock by hand, or forget marks, successes or starts.

    Name the lock as for `show`: by its key, or by a task and a call's arguments. With several permits the
    abandoned ones are released; KEY#3 means permit 3.

    Only what was shown is deleted; if it has changed since, nothing happens. Without --force a lock is only
    released if its deadline has passed or its process is surely dead. The first call in line is next.
    """
    queued, done, yes, force = (given.pop(name) for name in ("queued", "done", "yes", "force"))
    starts, names_call = given.pop("starts"), any(given.values())
    is_odd = (target is None and queued == done) or (target and queued) or (starts and done)
    if (target is None) == (task is None) or is_odd or (starts and task):
        raise click.UsageError(_WHAT_TO_RELEASE)
    if force and (queued or done or starts):
        raise click.UsageError("--force is only for locks: leave it out with --queued, --done and --starts")
    if task is not None and names_call:
        raise click.UsageError(
            f"--task means all calls of {task}; for one call give TASK and its ARGS instead"
        )
    from celery_setnx.cli import byhand
    from celery_setnx.cli.asked import loaded, permit_of, sight

    app = loaded(ctx.obj.app)
    if target is None:
        (byhand.forget_done_of if done else byhand.free_marks)(app, str(task), yes=yes)
    elif not (done or starts or names_call) and (found := permit_of(app, target)):
        byhand.release_lock(app, found[0], yes=yes, force=force, permit=found[1])
    else:
        sighting, _, instead = sight(app, target, given["arguments"], given["args_json"], given["kwargs"])
        if done:
            byhand.forget_done_call(app, sighting, yes=yes)
        elif starts:
            byhand.forget_starts_of(app, sighting, yes=yes)
        else:
            byhand.release_lock(app, sighting, yes=yes, force=force, instead=instead)


def _for_a_while(function: Any) -> Any:
    """The options of what ends by itself."""
    why = click.option("--because", metavar="TEXT", help="Why, for whoever asks.")
    until = click.option(
        "--for", "for_s", type=_Duration(), metavar="2h", help="When it ends. Defaults to 1d."
    )
    return until(why(function))


def _change(ctx: click.Context, name: Any, value: str, given: dict[str, Any]) -> None:
    from celery_setnx.cli.asked import loaded
    from celery_setnx.cli.terms import change, whose_of

    for_s, because = given.pop("for_s", None), given.pop("because", None)
    app = loaded(ctx.obj.app)
    change(app, whose_of(app, **given), name, value, for_s=for_s, because=because)


@setnx.command()
@click.argument("target", metavar="KEY|TASK")
@_of_call
@_for_a_while
@click.pass_context
def pause(ctx: click.Context, /, **given: Any) -> None:
    """Let no call start for a while: of a task, or of one key.

    Nothing that runs is stopped. Calls do what their `on_conflict` says; those that wait run afterwards.

    Give a TASK for all its calls; its ARGS, or a KEY, for one key.
    """
    _change(ctx, "pause", "-", given)


@setnx.command()
@click.argument("target", metavar="KEY|TASK")
@_of_call
@click.pass_context
def resume(ctx: click.Context, /, **given: Any) -> None:
    """End a pause: calls that wait go on within two seconds."""
    _change(ctx, "pause", "own", given)


@setnx.command()
@click.argument("target", metavar="KEY|TASK")
@_of_call
@click.argument("value", metavar="NUMBER|own")
@_for_a_while
@click.pass_context
def limit(ctx: click.Context, /, value: str, **given: Any) -> None:
    """Change for a while how many calls of a key may run at a time.

    `own` ends that: the task's own limit counts again.
    """
    _change(ctx, "limit", value, given)


@setnx.command()
@click.argument("target", metavar="KEY|TASK")
@_of_call
@click.argument("value", metavar="10/m|own")
@_for_a_while
@click.pass_context
def rate(ctx: click.Context, /, value: str, **given: Any) -> None:
    """Change for a while how many calls of a key may start in a period.

    `own` ends that: the task's own rate counts again, if it has one.
    """
    _change(ctx, "rate", value, given)


@setnx.command()
@_as_json
@click.pass_context
def terms(ctx: click.Context, as_json: bool) -> None:
    """List what was paused or limited by hand, for how long still, by whom and why."""
    from celery_setnx.cli.asked import loaded
    from celery_setnx.cli.terms import listed

    listed(loaded(ctx.obj.app), as_json=as_json)


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
                live.update(_picture(app, task, console.size), refresh=True)
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
@click.option("--acl", is_flag=True, help="Print the ACL lines for the user of the locks; ask no server.")
@_as_json
@click.pass_context
def doctor(ctx: click.Context, strict: bool, acl: bool, as_json: bool) -> None:
    """Examine the lock server, the settings and the tasks.

    Tries everything that a lock needs. Each finding says what was found, why it matters, and what to do.
    """
    if acl and (as_json or strict):
        raise click.UsageError("--acl only prints lines to copy: use it without other options")
    if acl:
        from celery_setnx.doctor.acl import acl_lines

        for line in acl_lines(ctx.obj.app):
            click.echo(line)
        return
    from celery_setnx.doctor.server import examine

    _report(ctx, examine, strict=strict, as_json=as_json)


def _report(
    ctx: click.Context, examine: Callable[[Celery], Iterable[Finding]], *, strict: bool, as_json: bool
) -> None:
    """Print what is found of the app, as it comes; the exit code says whether any of it is bad."""
    from celery_setnx.cli.asked import imported
    from celery_setnx.cli.describe import many
    from celery_setnx.cli.screen import Line, say
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
            what = f"{finding.level:8} {finding.subject}: {finding.what}"
            more = [f"{'':9}{text}" for text in (finding.why, finding.do) if text]
            say(Line(what, {"fg": _LEVELS[finding.level]}, first=8), *more)
    notes = f"{many(counts['note'], 'note')}, " if counts["note"] else ""
    wrong = f"{many(counts['warning'], 'warning')}, {many(counts['error'], 'error')}"
    say(f"{counts['ok']} ok, {notes}{wrong}.", err=True)
    ctx.exit(NO if counts["error"] or (strict and counts["warning"]) else 0)


def _print_json(rows: Iterable[dict[str, Any]]) -> int:
    """Print a JSON array, a row a line as they come; how many there were."""
    count = 0
    for count, row in enumerate(rows, 1):  # click.echo flushes each line, which takes longer than the rest
        sys.stdout.write((",\n " if count > 1 else "[") + json.dumps(row))
    sys.stdout.write("]\n" if count else "[]\n")
    sys.stdout.flush()
    return count


def _picture(app: Celery, task: str | None, size: ConsoleDimensions) -> Text:
    """The locks in a table that fits the screen, trouble first; or why Redis does not answer."""
    from rich.style import Style
    from rich.text import Text

    from celery_setnx.cli.asked import find, server
    from celery_setnx.cli.describe import COLUMNS, cells, many, style, worst_first
    from celery_setnx.cli.screen import left_out, table
    from celery_setnx.lock.scripts import REDIS_ERRORS
    from celery_setnx.wording import printable

    try:
        found = sorted(find(app, task, stale=False, queued=False), key=worst_first)
    except REDIS_ERRORS as error:
        what = printable(f"{server(app)}: {type(error).__name__}: {error}")
        return Text(f"{what}\nTrying again; Ctrl-C ends.", "red")
    room = max(1, size.height - 3)
    shown = found[:room]
    heading, *lines = table(COLUMNS, list(map(cells, shown)), size.width)
    hidden = f", {len(found) - room} of them not shown" if len(found) > room else ""
    picture = Text(f"{heading}\n", "bold", no_wrap=True, overflow="crop")
    for line, sighting in zip(lines, shown):
        look = style(sighting)
        picture.append(f"{line}\n", Style(color=look.get("fg"), dim=look.get("dim"), bold=False))
    count = f"{many(len(found), 'lock')}{hidden}, {time.strftime('%H:%M:%S')}. Ctrl-C ends."
    if hint := left_out(COLUMNS, heading):
        count += hint if len(count + hint) <= size.width else f"\n{hint.lstrip()}"
    return picture.append(count, Style(bold=False))
