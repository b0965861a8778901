"""A script that cron starts, and that never runs twice at a time: `python -m examples.plain_script`.

Without Celery: `python -m examples.plain_script nightly` is the script. Without an argument copies of it are
started: two at a time, one that is killed, and one after it.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import redis

from celery_setnx import AlreadyRunning, SetnxLock
from examples.checked import all_shown
from examples.embedded import EmbeddedServer

NAME, LEASE_S, PARTS, PART_S = "lock.nightly-report", 3.0, 12, 0.5
EX_TEMPFAIL = 75  # sysexits.h: "try again later"; os.EX_TEMPFAIL where there is one


def nightly(wait_s: float) -> int:
    """What cron starts: the work, part by part, under the lock."""
    client = redis.Redis.from_url(os.environ["REDIS_URL"], socket_timeout=2)
    who = {"task": "nightly report", "host": socket.gethostname(), "pid": os.getpid()}
    try:
        with SetnxLock(client, NAME, lease=LEASE_S, wait=wait_s, info=who) as held:
            print("works", flush=True)
            for _part in range(PARTS):
                held.renew()  # nobody else does; raises LockLost if the lock is another's by now
                time.sleep(PART_S)  # the work, each part shorter than the lease
    except AlreadyRunning as running:
        print(f"not now: {running.holder['description']}")
        return EX_TEMPFAIL
    print("done")
    return 0


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.plain_script", "nightly", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> bool:
    """Start copies, as cron would, and check how each ends."""
    first = start()
    first_words = first.stdout.readline()  # it has the lock
    second_words, second = finish(start())
    rest, first_status = finish(first)
    print("first copy: ", (first_words + rest).split(), "status", first_status)
    print("second copy:", second_words.strip(), "/ status", second)

    killed = start()
    killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    last_words, last = finish(start("10"))
    print("third copy:  killed with -9, and its lock stays until its lease ends")
    print("fourth copy:", last_words.split(), "status", last)

    checks = {
        "the first copy did all its work": (first_words + rest, first_status) == ("works\ndone\n", 0),
        "the second said who runs, and ended": second == EX_TEMPFAIL and f"(pid {first.pid})" in second_words,
        "a copy that waits takes over from a killed one": (last_words, last) == ("works\ndone\n", 0),
    }
    return all_shown(checks)


def finish(copy: subprocess.Popen[str]) -> tuple[str, int]:
    words, _ = copy.communicate(timeout=30)
    return words, copy.returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["nightly"]:
        sys.exit(nightly(wait_s=float(sys.argv[2]) if sys.argv[2:] else 0.0))
    if "REDIS_URL" not in os.environ:
        server = EmbeddedServer()  # dies with this process
        os.environ["REDIS_URL"] = server.url()
    sys.exit(not main())
