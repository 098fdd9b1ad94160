"""The servers of a ModelServer as one model (docs/model-routing.md). Decides which server is called and when, and
determines the policy version of each answer.
"""
