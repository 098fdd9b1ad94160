"""Programs in the pod of an inference server in a cluster: the gateway, and the download of its weights."""
