"""Names inside a sandbox pod, and the annotation that tells a later look why it is as it is."""

from rollout_api.base import API_GROUP

CONTAINER = "sandbox"
INIT_CONTAINER = "executor"
BUNDLE_VOLUME = "rollout-executor"
STATE_VOLUME = "rollout-state"
OWN_FOLDER = "/.rollout"
"""Where both are mounted; a pod template cannot mount anything there."""

OVERLAY_ANNOTATION = f"{API_GROUP}/overlay"
"""On a pod: reason and message of its Sandbox's condition Overlay, as `Reason: message`."""
