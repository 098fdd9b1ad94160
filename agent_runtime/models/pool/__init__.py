"""The servers of a ModelServer as one model (docs/model-routing.md): which server is called, when, and which policy
version answered.
"""
