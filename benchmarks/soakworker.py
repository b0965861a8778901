"""What a worker of the soak runs: the app that its environment describes."""

from __future__ import annotations

import json
import os

from benchmarks.soakapp import make_app

ARGUMENTS = "SOAK_APP"

app = make_app(*json.loads(os.environ[ARGUMENTS]))
