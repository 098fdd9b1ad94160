"""The tests of the contract that all providers share, run on this provider."""

from tests.integration.sandboxes.test_provider_contract import *  # noqa: F403

# A runner on a cluster opens another sandbox instead of waiting; and its sandboxes do use the image.
del test_attempt_waits_for_a_place_and_reports_when_none_becomes_free  # noqa: F821
del test_description_names_the_provider_and_the_actual_mode  # noqa: F821
