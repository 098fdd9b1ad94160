"""What clients speak, translated to one internal chat form and back. Pure: JSON objects in, JSON objects and SSE out."""
