"""What the docs say is run here: `python -m pytest tests/docs`.

Pages are read by `pages`, their Python is run by `runner` in a process of its own, with `prelude` and the
fragments' `setups` around it; each command that they show has its line in `commands`.
"""
