"""The daemon inside a sandbox: docs/executor.md is its contract."""

# The version of the contract, which `GET /v1/health` reports. Raised with every change of openapi.json: a runner does not
# use sandboxes of a pool that were started with another version.
CONTRACT_VERSION = "2"
