"""How devices find each other and communicate: mDNS, control messages, encrypted sockets, measured links."""
