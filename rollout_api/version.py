"""The version of all parts: they are released together."""

VERSION = "0.1.0"
