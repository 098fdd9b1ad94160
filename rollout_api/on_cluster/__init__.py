"""What a cluster makes of manifests: the operator acts by it, and `rolloutctl doctor` foresees it. Pure."""
