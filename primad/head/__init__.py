"""The head: it finds devices, plans, forms rings and serves the API."""
