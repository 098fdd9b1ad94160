"""Manifests and tasks as objects."""

from rollout_api.files import TaskFile
from rollout_api.manifest import load_manifest
from rollout_api.rollout_job import Mode, RolloutJob
from rollout_api.tasks import Task, TaskVerifier

__all__ = ["Mode", "RolloutJob", "Task", "TaskFile", "TaskVerifier", "load_manifest"]
