"""A model behind a NAT: its worker connects to the proxy by WebSocket, and answers the proxy's calls over that
connection.
"""
