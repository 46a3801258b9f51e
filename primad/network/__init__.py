"""Devices find each other and talk: mDNS, control messages, encrypted sockets, measured links."""
