"""The session proxy: agents with a public API reach the model through it, and every call is recorded."""
