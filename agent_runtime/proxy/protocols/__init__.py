"""Client APIs, translated to one internal chat format and back. Pure: JSON objects in, JSON objects and SSE out."""
