"""The process of a runner pod: a supervisor as PID 1, and the engine on one shard of a job below it."""
