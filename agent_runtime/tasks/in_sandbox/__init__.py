"""Programs that run in a sandbox, in the Python of a task's image: standard library alone, and syntax of Python 3.5."""
