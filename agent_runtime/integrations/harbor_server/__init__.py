"""Trials over HTTP with the Harbor server's API (verl-recipe PR #83): a server that runs them here, and a client for
trainers.
"""
