"""What a worker of the real run serves: the app that its environment describes."""

from __future__ import annotations

import json
import os

from tests.newest.app import Settings, make_app

app = make_app(Settings(*json.loads(os.environ["NEWEST_APP"])))
