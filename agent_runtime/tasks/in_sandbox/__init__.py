"""Programs that run in a sandbox with the Python of a task's image: standard library only, and syntax of Python 3.5."""
