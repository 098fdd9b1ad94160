"""Remote object storage, opened with the environment settings of each vendor's own tools."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from obstore.store import AzureStore, GCSStore, S3Store

RemoteObjects = S3Store | GCSStore | AzureStore
SCHEMES: Final = ("s3", "gs", "az")

# obstore retries first, on the same connection and with the same signature. This limit is well below the five minutes
# for which signatures are valid. Afterwards, Store retries with fresh credentials.
_REQUEST_RETRY: Final[Any] = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=5), "base": 2},
}

REQUEST_SECONDS: Final = 60
"""Time limit of one request with its body. obstore's default of 30 s is too short for a part of a large object over a
slow link.
"""

# The settings that obstore takes from its environment (obstore.store.S3Config, GCSConfig, AzureConfig). obstore refuses
# other variables with the same prefix, such as AWS_PROFILE.
_SETTINGS: Final = {
    "AWS": """access_key_id secret_access_key session_token region default_region endpoint endpoint_url endpoint_url_s3
        virtual_hosted_style_request role_arn role_session_name web_identity_token_file endpoint_url_sts
        container_credentials_relative_uri container_credentials_full_uri container_authorization_token_file
        metadata_endpoint request_payer s3_express server_side_encryption sse_kms_key_id skip_signature""",
    "GOOGLE": "service_account service_account_key application_credentials",
    "AZURE": """storage_account_name storage_account_key storage_client_id storage_client_secret storage_tenant_id
        client_id client_secret tenant_id federated_token_file authority_host storage_sas_key storage_token
        storage_endpoint msi_endpoint""",
}


def remote_objects(scheme: str, bucket: str, environ: Mapping[str, str], *, prefix: str | None = None) -> RemoteObjects:
    """Open the objects below a prefix of the bucket, or for `az` the container, with the settings of `environ`.

    Raises obstore's errors, OSError.
    """
    options: Any = {
        "allow_http": any(v.startswith("http://") for k, v in environ.items() if "ENDPOINT" in k),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
    }
    if bundle := environ.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = Path(bundle).read_bytes()
    common: Any = {"prefix": prefix, "client_options": options, "retry_config": _REQUEST_RETRY}
    if scheme == "s3":
        return S3Store(bucket, config=_settings("AWS", environ), **common)
    if scheme == "gs":
        return GCSStore(bucket, config=_settings("GOOGLE", environ), **common)
    return AzureStore(bucket, config=_settings("AZURE", environ), **common)


def _settings(vendor: str, environ: Mapping[str, str]) -> Any:
    names = {f"{vendor}_{name}".upper() for name in _SETTINGS[vendor].split()}
    return {name.lower(): value for name, value in environ.items() if name in names}
