"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# No test judges how long something took: machines differ, and are busy.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
