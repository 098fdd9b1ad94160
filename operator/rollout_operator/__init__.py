"""The operator: it creates runner Jobs for RolloutJobs, pods for Sandboxes, and inference servers for ModelServers."""
