"""The control plane: RolloutJobs become runner Jobs, Sandboxes become pods."""
