"""Trials by HTTP in the form of the Harbor server (verl-recipe PR #83): served by our engine, and asked for by a trainer."""
