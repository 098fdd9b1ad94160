"""What runs beside an inference engine in a cluster: the gateway of its pod, and the program that fetches its weights."""
