"""`python -m rollout_operator`."""

from rollout_operator.main import main

main()
