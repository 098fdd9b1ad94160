"""A model behind the servers of a ModelServer (docs/model-routing.md): who is asked, when, and which policy answered."""
