"""How the operator interprets manifests. `rolloutctl doctor` uses the same functions as a prediction. No side effects."""
