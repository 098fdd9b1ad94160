"""What each inference server is, understands and can do, as data: the operator, the gateway and runners act by it."""
