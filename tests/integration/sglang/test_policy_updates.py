"""Policy updates of SGLang itself and of its stand-in: operator, gateway, and a runner's calls in flight, as for vLLM."""

from tests.integration.vllm.test_policy_updates import (  # noqa: F401
    served,
    test_client_that_leaves_the_gateway_ends_its_request,
    test_failed_load_returns_to_version_0,
    test_gateway_serves_the_digest_of_the_loaded_weights,
    test_update_loses_no_call_and_records_the_version_of_each_token,
    test_version_0_is_served_again_after_an_update,
)
