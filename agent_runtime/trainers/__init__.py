"""Trainers that run this engine inside of themselves; one folder a trainer, imported only by it."""
