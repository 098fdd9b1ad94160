"""Where a manifest has things stored: the results of a job, the files of a parked Sandbox."""

from typing import Annotated

from pydantic import StringConstraints, field_validator

from rollout_api.base import ApiModel, ObjectName


class Storage(ApiModel):
    """A place in object storage, or a local folder."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    """`s3://`, `gs://`, `az://` with a prefix, or a local folder."""
    secret_ref: ObjectName | None = None
    """Secret whose keys are the store's own environment variables, such as AWS_ACCESS_KEY_ID."""

    @field_validator("uri")
    @classmethod
    def _known_scheme(cls, uri: str) -> str:
        scheme, separator, _ = uri.partition("://")
        if separator and scheme.lower() not in ("s3", "gs", "az", "file"):
            raise ValueError(f"scheme {scheme!r} is unknown; use s3://, gs://, az://, file:// or a local folder")
        return uri
