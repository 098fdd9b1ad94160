"""A model behind a NAT: its worker connects out to the proxy by WebSocket, and answers the proxy's calls over that."""
