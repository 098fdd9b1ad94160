"""Sandboxes as pods: `Sandbox` resources, for which the operator creates pods."""
