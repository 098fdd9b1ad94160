"""The version of all packages, which are released together."""

VERSION = "0.1.0"
