"""The session proxy: agents that speak a public API reach the model through it, and every call is recorded."""
