"""Configuration files for Hydra, which finds them in packages alone."""
