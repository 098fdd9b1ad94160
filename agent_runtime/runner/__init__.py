"""The process of a runner pod: a supervisor as PID 1, and the engine for one shard of a job as its child."""
