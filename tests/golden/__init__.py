"""Numbers of the reference codes, and the runner that holds ours against them: ``python -m tests.golden DIR``."""
