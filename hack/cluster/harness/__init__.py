"""A real Kubernetes on one Linux machine, for tests: built from source once, started in seconds, removed completely.

Standard library only, so that it runs on a fresh clone before any virtual environment exists.
"""
