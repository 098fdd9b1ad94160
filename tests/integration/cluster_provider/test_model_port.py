"""A program in a workspace and its model, as with the local provider, over the pods' network."""

from tests.integration.sandboxes.test_model_port import (
    test_a_program_in_a_workspace_without_network_reaches_its_model,
    test_a_stopped_program_stops_its_model_call,
    test_model_port_is_closed_in_the_next_phase,
    test_request_without_a_server_waits_for_the_next_one,
)

__all__ = [
    "test_a_program_in_a_workspace_without_network_reaches_its_model",
    "test_a_stopped_program_stops_its_model_call",
    "test_model_port_is_closed_in_the_next_phase",
    "test_request_without_a_server_waits_for_the_next_one",
]
