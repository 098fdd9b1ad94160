"""The gateway's own routes, on the control port. Those of inference servers are in `rollout_api/inference`."""

from typing import Final

from rollout_api.inference.description import Route

FETCH_POLICY: Final[Route] = ("POST", "/policy/fetch")
SERVED_POLICY: Final[Route] = ("GET", "/policy/served")
SERVE_POLICY: Final[Route] = ("POST", "/policy/served")
DIGEST_POLICY: Final[Route] = ("POST", "/policy/digest")
WANT_ADAPTERS: Final[Route] = ("POST", "/policy/adapters")
CALL_HOOK: Final[Route] = ("POST", "/policy/hook")
OWN: Final[frozenset[Route]] = frozenset(
    {FETCH_POLICY, SERVED_POLICY, SERVE_POLICY, DIGEST_POLICY, WANT_ADAPTERS, CALL_HOOK}
)
