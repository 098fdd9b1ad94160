"""Configuration files for Hydra, which only finds them in packages."""
