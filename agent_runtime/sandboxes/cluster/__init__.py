"""Sandboxes that are pods: `Sandbox` resources, which the operator turns into them."""
