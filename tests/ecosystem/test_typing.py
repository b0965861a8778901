"""celery-types: what users write beside its stubs passes mypy --strict."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_code_of_a_user_with_the_stubs_of_celery_types_passes_mypy_strict(tmp_path):
    """And what must be refused, is: its ignore comments are all used."""
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", tmp_path]
    checked = subprocess.run(
        [*command, HERE / "typed.py"], capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
