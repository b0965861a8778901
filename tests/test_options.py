"""Options: names, values, layers, and what cannot go together."""

from datetime import timedelta

import pytest
from celery import Celery

from celery_setnx import OptionError
from celery_setnx.options import NAMES, Options, SingletonOptions, merged, plain, settings


def test_defaults_are_those_of_the_table():
    """Nothing given: a lease of 30 s, auto, all arguments as key."""
    options = merged("t")
    assert options == Options()
    assert (options.lease, options.on_conflict) == (30, "auto")
    assert (options.key, options.on_redis_error) == (None, "retry")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"on_conflct": "skip"}, "proj.t has an unknown option 'on_conflct'; did you mean 'on_conflict'"),
        ({"zzz": 1}, "unknown option 'zzz'; the options are key, scope"),
        ({"unique_on": "a"}, "unknown option 'unique_on'; use key"),
        ({"keys": ["a"]}, "unknown option 'keys'; use key"),
        ({"timeout": 60}, "unknown option 'timeout'; use lease .* renews it.* at_most_for"),
        ({"ttl": 60}, "unknown option 'ttl'; use lease"),
        ({"lock_expiry": 60}, "unknown option 'lock_expiry'; use lease"),
        ({"graceful": True}, "use on_duplicate='return', the default .'raise' for False.$"),
        ({"raise_on_duplicate": True}, "use on_duplicate='raise'"),
        ({"unlock_before_run": True}, "use dedupe='until_started'"),
        ({"on_conflict": "skpi"}, "on_conflict of proj.t must be one of .* not 'skpi'; did you mean 'skip'"),
        ({"on_conflict": None}, "must be one of"),
        ({"on_redis_error": "ignore"}, "on_redis_error of proj.t must be one of 'retry', 'run', 'raise'"),
        ({"lease": 0}, "lease of proj.t must be more than 0 seconds, not 0"),
        *(({"lease": lease}, "must be more than 0 seconds, not") for lease in (-1, float("nan"))),
        ({"lease": float("inf")}, "must be at most ten years"),
        ({"lease": 1e10}, r"lease of proj.t must be at most ten years, not 1e\+10 s"),
        ({"lease": 1e-7}, "lease of proj.t must be at least a millisecond, not 1e-07"),
        ({"lease": "30"}, "must be seconds or a timedelta, not '30'"),
        *(({"lease": lease}, "must be seconds or a timedelta") for lease in (True, None)),
        ({"at_least_for": -1}, "must be 0 seconds or more, not -1"),
        ({"max_wait": -1}, "must be 0 seconds or more, or None, not -1"),
        ({"retry_delay": 0}, "must be more than 0 seconds"),
        ({"retry_delay": 5, "retry_delay_max": 1}, "retry_delay_max .* is shorter than its retry_delay"),
        ({"at_least_for": 5, "at_most_for": 1}, "at_most_for .* is shorter than its at_least_for"),
        ({"scope": "a{b"}, "scope of proj.t must be text without braces"),
        ({"scope": ""}, "must be text without braces"),
        ({"hold_on_retry": 2}, "hold_on_retry of proj.t must be True or False"),
        ({"dedupe": "until_later"}, "dedupe of proj.t must be one of"),
        ({"on_conflict": "joins"}, "did you mean 'join'"),
        ({"max_wait": float("inf")}, "max_wait of proj.t must be at most ten years"),
        ({"on_duplicate": "rais"}, "on_duplicate of proj.t must be one of .*did you mean 'raise'"),
        (
            {"dedupe": "until_started", "on_conflict": "skip"},
            "would be skipped, and miss .*; use on_conflict='wait'",
        ),
        ({"dedupe": "until_started", "on_conflict": "join"}, "would get the result of that run"),
        ({"queue_lease": 0}, "queue_lease of proj.t must be more than 0 seconds"),
        ({"limit": 0}, "limit of proj.t must be a whole number from 1 to 100, not 0"),
        ({"rate": "10/w"}, "rate of proj.t must be text such as '10/m' .*, or a pair .* not '10/w'"),
        ({"rate": (0, 60)}, r"rate of proj.t must allow 1 to 1000 starts, not \(0, 60\)"),
        ({"rate": (10, 1e8)}, "the period of the rate of proj.t must be from 1 ms to 366 days"),
        ({"rate": (10, 0)}, "rate of proj.t must be more than 0 seconds, not 0"),
        ({"limit": 5, "on_conflict": "join"}, "limit=5 and on_conflict='join': .* no single result to share"),
        ({"limit": 5, "dedupe": "until_done"}, "has limit=5 and dedupe='until_done'"),
        ({"rate": "10/m", "on_conflict": "join"}, "has a rate and on_conflict='join'"),
        ({"limit": 5, "rate": "10/m", "hold_on_retry": True}, "drop one of the three"),
        ({"dedupe_for": 9}, "dedupe_for=9 and dedupe=None: dedupe_for needs dedupe='until_done'"),
        ({"debounce": 0}, "debounce of proj.t must be more than 0 seconds, or None, not 0"),
        ({"debounce_max": None}, "debounce_max of proj.t must be seconds or a timedelta, not None"),
        ({"debounce": 5, "debounce_leading": 1}, "debounce_leading of proj.t must be True or False, not 1"),
        ("lease=5", "must be a mapping"),
    ],
)
def test_bad_option_is_refused_by_name(layer, message):
    """What was expected, what came, and what was perhaps meant."""
    with pytest.raises(OptionError, match=message):
        merged("proj.t", layer)


REPLACE = {"dedupe": "until_started", "on_duplicate": "replace"}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"on_duplicate": "replace"}, "proj.t has on_duplicate='replace' and dedupe=None: .*'until_started'"),
        (
            {"on_duplicate": "replace", "dedupe": "until_done"},
            "has on_duplicate='replace' and dedupe='until_done': a call is replaced until it has started",
        ),
        ({"debounce": 5, "dedupe": "until_done"}, "has debounce=5 and dedupe='until_done'"),
        ({"debounce": 5, "dedupe": None}, "has debounce=5 and dedupe=None"),
        (
            {**REPLACE, "limit": 2},
            "has on_duplicate='replace' and limit=2: an older call may end after",
        ),
        ({"debounce": 5, "limit": 2}, "has debounce=5 and limit=2: .*; leave the limit at 1"),
        ({**REPLACE, "on_conflict": "raise"}, "on_conflict='raise': the newest call would fail .*'wait'"),
        ({"debounce": 5, "on_conflict": "raise"}, "has debounce=5 and on_conflict='raise'"),
        ({**REPLACE, "on_conflict": "skip"}, "on_conflict='skip': .* would be skipped, and miss"),
        ({"debounce": 5, "on_conflict": "join"}, "on_conflict='join': .* would get the result of that run"),
        (
            {"debounce": 5, "on_duplicate": "return"},
            "has debounce=5 and on_duplicate='return': .* leave",
        ),
        ({"debounce": 5, "on_duplicate": "raise"}, "has debounce=5 and on_duplicate='raise'"),
        ({"debounce_leading": True}, "has debounce_leading and no debounce; add debounce=, in seconds"),
        ({"debounce": 5, "debounce_max": 4}, r"debounce_max \(4 s\) of proj.t is shorter than its debounce"),
        ({"debounce": 61}, r"debounce_max \(60 s\) of proj.t is shorter than its debounce \(61 s\)"),
    ],
)
def test_options_that_would_lose_the_newest_call_are_refused_together(layer, message):
    """What goes wrong else, and what to do."""
    with pytest.raises(OptionError, match=message):
        merged("proj.t", layer)


@pytest.mark.parametrize("policy", ["auto", "wait", "retry", print])
def test_newest_call_may_wait_retry_or_decide(policy):
    """It comes back, so its arguments are not lost; a callable takes that upon itself."""
    assert merged("t", {**REPLACE, "on_conflict": policy}).replaces


def test_debounce_implies_that_the_newest_call_replaces_the_others():
    """Without it a call does neither; `debounce_max` is the bound in both cases."""
    options = merged("t", {"debounce": timedelta(seconds=5)})
    assert (options.debounce, options.debounce_max, options.debounce_leading) == (5, 60, False)
    assert (options.dedupe, options.on_duplicate, options.replaces) == ("until_started", "replace", True)
    assert not merged("t").replaces
    assert merged("t", {**REPLACE, "debounce_max": 5}).debounce_max == 5


def test_debounce_of_a_farther_layer_can_be_switched_off():
    """And what it implies, with it."""
    options = merged("t", {"debounce": 5}, {"debounce": None})
    assert (options.debounce, options.dedupe, options.replaces) == (None, None, False)


NONE = {"max_wait": None, "at_most_for": None, "skip_result": None, "dedupe": None, "hold_on_retry": False}
NONE |= {"debounce": None}


@pytest.mark.parametrize("name", NONE)
def test_none_means_the_default(name):
    """Switching an option off is allowed where the table says none."""
    merged("t", {"max_wait": 1, "at_most_for": 1}, {name: NONE[name]})


def test_callable_of_one_call_is_refused():
    """A message carries no functions."""
    with pytest.raises(OptionError, match="'on_conflict' of t is a callable"):
        plain("t", {"on_conflict": print})
    with pytest.raises(OptionError, match="'key' of t is a callable"):
        plain("t", {"key": lambda: 1})


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"setnx_prefix": "a{b"}, "setnx_prefix must be text without braces"),
        ({"setnx_same_host": "no"}, "setnx_same_host must be True or False"),
        ({"setnx_retention": -1}, "setnx_retention of the app must be more than 0 seconds"),
        ({"setnx_timeout": 0}, "setnx_timeout of the app must be more than 0 seconds"),
        ({"setnx_defaults": {"leese": 1}}, "setnx_defaults has an .* option 'leese'; did you mean 'lease'"),
    ],
)
def test_bad_setting_is_refused(conf, message):
    """The app's settings are held to the same rules."""
    with pytest.raises(OptionError, match=message):
        settings(conf)


def test_settings_are_read_under_celerys_namespace():
    """config_from_object(namespace="CELERY") gives CELERY_SETNX_PREFIX."""
    app = Celery("spaced", set_as_current=False)
    conf = {"CELERY_SETNX_PREFIX": "prod", "CELERY_SETNX_DEFAULTS": {"lease": 5}}
    app.config_from_object(conf, namespace="CELERY")
    read = settings(app.conf)
    assert (read.prefix, read.defaults, read.retention) == ("prod", {"lease": 5.0}, 86400)


def test_typed_options_are_all_options():
    """What editors complete is what may be written."""
    assert tuple(SingletonOptions.__annotations__) == NAMES
